"""`neuron-push trace`: events of routers and engines on one clock, as a timeline."""
