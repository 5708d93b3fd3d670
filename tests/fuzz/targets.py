"""What is fuzzed: each takes bytes, and raises only if something is wrong with us."""

from __future__ import annotations

import msgspec

from neuron_push.config import Config
from neuron_push.errors import PeerError
from neuron_push.protocol import (
    MAGIC,
    VERSION,
    Hello,
    Match,
    Welcome,
    decode_notification,
    decode_side_channel,
    encode,
)
from neuron_push.rendezvous import Core, Identity
from neuron_push.rendezvous import events as ev
from neuron_push.router import bodies
from neuron_push.vllm import params
from tests.fuzz import http
from tests.fuzz.loop import JSON, MSGPACK, read
from tests.model.freeze import Key
from tests.rendezvous.net import Faults
from tests.rendezvous.shapes import SEMANTICS, Shape
from tests.rendezvous.world import World

SHAPE = Shape()
GEOMETRY = SHAPE.geometry(0)
CONFIG = Config()


def pair():
    """Two engines in the middle of a transfer."""
    world = World(1, {"P0": ("producer", SHAPE), "D0": ("consumer", SHAPE)}, Faults(write_slow=9.0))
    match = Match("t", "b", b"prompt", 40)
    world.engines["D0"].receive(match, "prompt", "P0")
    source = world.engines["P0"].offer(match)
    world.run(0.1)
    world.engines["P0"].settle(source, "prompt", 0, 24, 40, last=False)
    world.run(0.1)
    return world


WORLD = pair()


def key_of(process):
    """All that a core knows."""
    return Key(WORLD.now, 1e9, {}).of(process.core)


def notification(data: bytes) -> None:
    """A notification, from a stranger: nothing changes, whatever it says."""
    try:
        message = decode_notification(data)
    except PeerError:
        message = None
    for engine in WORLD.engines.values():
        process = engine.processes[0]
        before = key_of(process)
        agent = "X/0/1/0"
        event = ev.Garbage(agent, "no") if message is None else ev.Notified(agent, message)
        process.core.handle(event, WORLD.now)
        assert key_of(process) == before, "a stranger's message changed something"


def notification_of_a_peer(data: bytes) -> None:
    """The same from a peer: it may end its own transfer, and stops nobody."""
    try:
        message = decode_notification(data)
    except PeerError:
        return
    world = pair()
    for engine, other in (("P0", "D0"), ("D0", "P0")):
        agent = next(iter(world.engines[other].processes[0].open.values()))
        core = world.engines[engine].processes[0].core
        core.handle(ev.Notified(agent, message), world.now)
        core.tick(world.now + 0.1)
        assert len(core.links) <= 1


def side_channel(data: bytes) -> None:
    """A frame of the side channel; a hello gets exactly one answer."""
    try:
        message = decode_side_channel(data)
    except PeerError:
        return
    if not isinstance(message, Hello):
        return
    core = Core(CONFIG, Identity("P", 0, 1, SEMANTICS, GEOMETRY))
    core.handle(ev.Opened(1, core._context.identity.agent(1), b"metadata"), 1.0)
    actions = core.handle(ev.HelloArrived("token", message), 1.0)
    answers = [action for action in actions if isinstance(action, ev.Answer)]
    assert len(answers) == 1
    assert len(core.links) == isinstance(answers[0].message, Welcome)


def parameters(data: bytes) -> None:
    """`kv_transfer_params`: a leg, nothing, or a refusal in words."""
    try:
        value = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    for role in ("kv_producer", "kv_consumer", "kv_both"):
        try:
            params.parse(value, role)
        except params.ParamsError as error:
            assert len(str(error)) < 1000


def router(data: bytes) -> None:
    """The body of a client, and an engine's answer."""
    bodies.reason_in(data)
    bodies.unfinished_prefill(data)
    bodies.coordinates(data)
    bodies.first_token(data)
    bodies.request_id(data.decode("latin-1"))
    try:
        body = bodies.parse(data)
    except bodies.BadBody as error:
        assert str(error)
        return
    assert "kv_transfer_params" not in body
    for chat in (False, True):
        leg = msgspec.json.decode(bodies.prefill_body(body, chat, "t"))
        assert leg["kv_transfer_params"]["transfer_id"] == "t" and leg["max_tokens"] == 1


TARGETS = {
    "notification": (notification, MSGPACK),
    "peer": (notification_of_a_peer, MSGPACK),
    "side_channel": (side_channel, MSGPACK),
    "parameters": (parameters, JSON),
    "router": (router, JSON),
    "http": (http.http, JSON),
}


def begin(name: str) -> list[bytes]:
    """Well-formed inputs of every kind, and the corpus as frames of the protocol's version."""
    frames = TARGETS[name][1] is MSGPACK
    kept = read(name)
    if frames:
        kept += [MAGIC + bytes([VERSION]) + data[3:] for data in kept if data[:2] == MAGIC]
    return [*seeds()[name], *kept]


def seeds() -> dict[str, list[bytes]]:
    """One well-formed input of every kind, to begin a corpus with."""
    from tests.rendezvous.test_tables import MESSAGES

    hello = Hello("D", 0, 1, 1, SEMANTICS, GEOMETRY, "D/0/1/0", b"meta", ((0, 1, 2, 3),), 1)
    frames = [encode(message) for message in MESSAGES]
    decode = {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t",
        "remote_host": "h", "remote_port": 5600, "remote_engine_id": "p", "deadline_ms": 1000,
        "remote_request_id": "r", "remote_block_ids": [[1, 2]],
    }  # fmt: skip
    prefill = {"do_remote_decode": True, "transfer_id": "t"}
    body = {
        "model": "m", "prompt": "p", "max_tokens": 4, "stream": True, "kv_transfer_params": {},
        "stream_options": {}, "n": 2, "messages": [{"role": "user", "content": "x"}],
    }  # fmt: skip
    answer = {
        "choices": [{"finish_reason": "length"}], "error": {"message": "no"}, "usage": {},
    }  # fmt: skip
    json = msgspec.json.encode
    return {
        "notification": frames, "peer": frames, "side_channel": [encode(hello)],
        "parameters": [json(decode), json(prefill)], "router": [json(body), json(answer)],
        "http": http.seeds(),
    }  # fmt: skip
