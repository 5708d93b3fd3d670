"""`Transport` over NIXL's Python API, nixl 1.3.2 to 1.5.

The only package that touches NIXL, and not before the first agent is opened. What is known here
about NIXL and not written in its documentation was measured with UCX over tcp, nixl 1.3.2,
1.4.1 and 1.5.1:

* nothing recalls a posted WRITE but the end of one of the two agents (tests/test_nixl_fence.py);
* loading metadata that is loaded already is a no-op, even if the connection is dead: a peer is
  removed before it is added again. Loading fails at once if nobody listens there any more;
* the first notification to a peer that was killed may vanish without an error; every later call
  raises "remote disconnect", and so does the next poll of a WRITE;
* no call blocks for more than a few milliseconds toward a peer that is stopped, and destroying an
  agent takes 2 to 10 ms whatever is in flight;
* a notification may hold bytes of any value and as many as memory allows (64 MiB went through).
"""

from neuron_push.nixl.agent import NixlTransport
from neuron_push.nixl.binding import binding
from neuron_push.nixl.opening import NixlFactory, factory

__all__ = ["NixlFactory", "NixlTransport", "binding", "factory"]
