"""`neuron-push bench handover` and `bench notice`: what lies between the engines.

command   handover per prompt length and arrangement of blocks, beside vLLM's connectors
drive     single requests through the proxy, and what traces and devices say of them
limit     one NIXL WRITE of the bytes that are left, with its notification
notice    how soon D learns of a transfer that has landed
hog       the same between two transfer threads, one beside a main loop that never lets go
"""
