"""The side channel: short questions and answers over TCP, through ZeroMQ.

`Server` and `Client` belong to one thread each and never block it; `Listener` brings a thread
of its own. Questions are answered in one frame or not at all, each over a connection of its
own, so an answer needs no number to be told from others.

Without keys nothing here is authenticated: whoever reaches the port may ask, so listen on
addresses of a trusted network only (the default is loopback). With keys (keys.py) both sides
prove to hold one, and what they say is encrypted.
"""

from neuron_push.sidechannel.client import Client, ask, ask_async
from neuron_push.sidechannel.keys import Keyring, add_option
from neuron_push.sidechannel.listener import Listener
from neuron_push.sidechannel.server import Request, Server

__all__ = [
    "Client",
    "Keyring",
    "Listener",
    "Request",
    "Server",
    "add_option",
    "ask",
    "ask_async",
]
