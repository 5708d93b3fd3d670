"""The whole stack on one virtual clock: schedulers, worker halves, transfer threads, router.

Real are vLLM's scheduler, both halves of the connector, the transfer thread (stepped by hand) and
the router; played are the device, the network, the sockets, the memory and the people. One seed
decides everything.
"""
