"""Producer and consumer state machines, pure.

Theory of operation. A worker rank runs one `Core`. A decode rank finds a prefill engine
(routes), greets the ranks it needs (links), registers reserved blocks (consumer) and waits.
A prefill rank checks what it is asked (admission), matches registrations with prompts (sender,
sources) and posts WRITEs, each carrying a `Done` for the tokens it moved (writes). Whatever goes
wrong ends in one of two ways: the peer confirms that nothing is in flight (`Cancelled`), or our
agent is replaced and the old one destroyed (fence). Only then do blocks go back.

The states of both sides are tables: attempt.py for decode, producer.py for prefill.

Nothing in here knows a thread, a socket or a clock; a test holds that.
"""

from neuron_push.rendezvous.core import Core, Tempo
from neuron_push.rendezvous.links import Context, Identity, Link, agent_name

__all__ = ["Context", "Core", "Identity", "Link", "Tempo", "agent_name"]
