"""`neuron-push demo`: two real engines, one pushing KV into the other, checked token for token."""
