"""`neuron-push doctor`: what is wrong with this machine for pushing KV, and what to do about it.

finding    one thing that was seen, its weight, why it matters, what to do
machine    files, variables, commands and libraries of a machine; a fake one in tests
software   versions, duplicates, placeholders, the plugin as vLLM would load it
variables  environment variables that break or slow transfers
fabric     EFA devices, libfabric, huge pages, locked memory
devices    Trainium and NVIDIA devices, and the libraries that reach them
backends   NIXL's backends, each tried in a process of its own, with a loopback WRITE
network    side channel: host, ports
peer       can the engine here and another one talk
child      what runs in those processes
command    the command line

Every check is a function from a Machine (and Options) to findings, and runs nothing itself.
"""
