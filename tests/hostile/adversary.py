"""A process that speaks both channels correctly and means harm.

It greets as a decode rank, answers as a prefill engine, and so has open links of its own to both
ends of a live pair. Over them it sends what is well framed and false, from a seed. It does not
write into anybody's memory: whoever reaches a NIXL agent may, and nothing here keeps it from that.
"""

from __future__ import annotations

import multiprocessing
import random
import socket
import time

import msgspec
import numpy as np
import zmq

from neuron_push.bench.pipe import answer
from neuron_push.errors import NeuronPushError
from neuron_push.geometry import Geometry, Region
from neuron_push.nixl import NixlTransport
from neuron_push.protocol import (
    Address,
    Alive,
    BlockList,
    Cancel,
    Cancelled,
    Done,
    EngineInfo,
    Failed,
    Grant,
    Hello,
    Kept,
    Lend,
    Match,
    Move,
    Moved,
    Need,
    RankInfo,
    Register,
    Registered,
    Return,
    Soon,
    Taken,
    Welcome,
    Who,
    encode,
)
from neuron_push.sidechannel import Server, ask

ENGINE, INCARNATION = "A", 7
AGENT = f"{ENGINE}/0/{INCARNATION:x}/1"
HUGE = 2**63 - 1
LISTS = (
    (),
    (BlockList(0, (1, 1)), BlockList(0, (1, 1))),
    (BlockList(0, (1, 1 << 30)),),
    (BlockList(0, (1 << 20, 4)),),
    (BlockList(0, (HUGE, HUGE)),),
    (BlockList(0, (-5, 3)),),
    (BlockList(0, (5,)),),
    (BlockList(-1, (1, 9)),),
    (BlockList(HUGE, (1, 4)),),
)
STRANGERS = ("P/0/1/9", "D/0/1/9", "A/0/7/" + "9" * 500, "", "/", AGENT, "nobody")


class Adversary:
    """What runs in the process; `Attacker` is how a test tells it what to do."""

    def __init__(self) -> None:
        self._memory = np.zeros(1 << 16, np.uint8)
        region = Region(int(self._memory.ctypes.data), self._memory.nbytes, "DRAM", 0)
        self._agent = NixlTransport(AGENT, [region])
        self._server = Server("127.0.0.1", 0)
        self._peers: dict[str, str] = {}  # agents, by what the adversary is to them
        self._links: dict[str, int] = {}  # numbers of the hellos, likewise
        self._open: list[socket.socket] = []
        self.address = self._server.address

    # ------------------------------------------------------------------ links

    def greet(self, address: Address) -> str:
        """Open a link to a prefill engine, as a decode rank that lies about its memory."""
        info = ask(address, Who(), 5.0)
        assert isinstance(info, EngineInfo)
        rank = info.ranks[0]
        heads = tuple(group.heads for group in rank.geometry.groups)
        self._links["decode"] = 5
        hello = Hello(
            ENGINE, 0, INCARNATION, 5, info.semantics, lying(rank.geometry), AGENT,
            self._agent.metadata(), heads, 1,
        )  # fmt: skip
        welcome = ask(rank.address, hello, 5.0)
        assert isinstance(welcome, Welcome)
        for false in (  # an older one, and some in others' names
            msgspec.structs.replace(hello, link=4),
            msgspec.structs.replace(hello, engine="D"),
            msgspec.structs.replace(hello, incarnation=8),
            msgspec.structs.replace(hello, rank=-1),
            msgspec.structs.replace(hello, ask=((99,),)),
        ):
            try:
                ask(rank.address, false, 5.0)
            except NeuronPushError:
                continue
            raise AssertionError(f"welcomed {false}")
        self._peers["decode"] = self._agent.add_peer(welcome.metadata)
        return self._peers["decode"]

    def serve(self, address: Address) -> str:
        """Be the prefill engine that a decode engine at `address` has been sent to."""
        info = ask(address, Who(), 5.0)
        assert isinstance(info, EngineInfo)
        mine = RankInfo(0, INCARNATION, self.address, info.ranks[0].geometry)
        listing = msgspec.structs.replace(info, engine=ENGINE, role="producer", ranks=(mine,))
        end = time.monotonic() + 10
        while "prefill" not in self._peers and time.monotonic() < end:
            for request in self._server.poll():
                message = request.message
                if isinstance(message, Who):
                    request.answer(listing)
                elif isinstance(message, Hello):
                    self._links["prefill"] = message.link
                    self._peers["prefill"] = self._agent.add_peer(message.metadata)
                    request.answer(Welcome(ENGINE, 0, INCARNATION, AGENT, self._agent.metadata()))
            time.sleep(0.001)
        return self._peers["prefill"]

    # ------------------------------------------------------------------ what it sends

    def lie(self, role: str, own: int, others: list[int], seed: int, count: int) -> None:
        """Messages of one role: of `own` attempt what cannot be, of `others` whatever it may."""
        rng = random.Random(seed)
        make = self._as_prefill if role == "prefill" else self._as_decode
        for _ in range(count):
            payload = encode(make(rng, own, others))
            self._say(role, mangled(rng, payload) if rng.random() < 0.3 else payload)

    def flood(self, role: str, first: int, count: int) -> None:
        """Well-formed messages without end: registrations as decode, else signs of life."""
        match = Match("nothing", "nothing", b"nothing", 16)
        for number in range(first, first + count):
            blocks = (BlockList(0, (1, 1)),)
            wish = Register(number, self._links["decode"], match, 0, 16, blocks, 1 << 40)
            self._say(role, encode(wish if role == "decode" else Alive(answer=True)))

    def covet(self, number: int, name: str, tokens: int) -> None:
        """Ask for a prompt that is there, into memory that the adversary does not have."""
        match = Match(name, name, b"digest", tokens)
        blocks = (BlockList(0, (1 << 19, tokens // 16)),)
        wish = Register(number, self._links["decode"], match, 0, tokens, blocks, 60_000)
        self._say("decode", encode(wish))

    def leave(self, role: str) -> None:
        """End the link by what ends it: a move to nowhere."""
        self._say(role, encode(Move(role, f"{AGENT[:-1]}2", b"no metadata")))

    def batter(self, ports: list[int], seed: int) -> None:
        """What is no side channel, half of one, and frames that are no messages."""
        rng = random.Random(seed)
        whole = encode(Who())
        frames = [b"", whole[:-1], whole + b"x", rng.randbytes(2000), encode(Alive(True))]
        for port in ports:
            for number in range(12):
                raw = socket.create_connection(("127.0.0.1", port))
                raw.sendall(rng.choice([b"", b"\xff" + bytes(8) + b"\x7f", rng.randbytes(100)]))
                self._open.append(raw) if number % 2 else raw.close()
            context = zmq.Context()
            for frame in frames:
                dealer = context.socket(zmq.DEALER)
                dealer.connect(f"tcp://127.0.0.1:{port}")
                dealer.send_multipart([frame] * rng.choice([1, 3]))
            context.destroy(linger=200)

    def rest(self) -> None:
        """Let what was sent travel."""
        end = time.monotonic() + 0.2
        while time.monotonic() < end:
            self._agent.notifications()
            time.sleep(0.001)

    def _say(self, role: str, payload: bytes) -> None:
        self._agent.notify(self._peers[role], payload)
        self._agent.notifications()

    def _as_prefill(self, rng, own, others):
        about, link = rng.choice(others), self._links["prefill"]
        return rng.choice([
            Done(own, 0, 1 << 40), Done(own, 1 << 30, 1 << 31), Done(own, 0, 16, piece=3),
            Done(own, 0, 16, part=rng.randint(1, 2), parts=3), Need(own, rng.randint(1, 1 << 30)),
            Return(own, rng.randint(1, 1 << 30)), Lend(own, link, rng.choice(LISTS)),
            Kept(own, link, b"d" * 64), Soon(own), Registered(own),
            Done(about, 0, 16), Done(about, 0, 64), Failed(about, "?" * 600), Cancelled(about),
            Need(about, 1), Lend(about, link, rng.choice(LISTS)), Kept(about, link),
            Register(about, link, Match("", "", b"", 16), 0, 16, rng.choice(LISTS), 0),
            Cancel(about, "no"), Taken(about, link), Grant(about, 1, rng.choice([0, HUGE])),
            Move("decode", rng.choice(STRANGERS), b"x"), Moved("prefill", rng.choice(STRANGERS)),
            Alive(True),
        ])  # fmt: skip

    def _as_decode(self, rng, own, others):
        about, link = rng.choice(others), self._links["decode"]
        match = Match(rng.choice(["", "x"]), "x", rng.choice([b"", b"x" * 64]), 64)
        return rng.choice([
            Register(own + rng.randint(0, 9), link, match, 0, 64, rng.choice(LISTS), 1 << 60),
            Register(about, link - 1, match, 0, 16, (BlockList(0, (1, 1)),), 1000),
            Register(about, link, match, 48, 16, (), 0), Cancel(about, "?" * 600),
            Taken(about, link), Taken(about, link - 1), Grant(about, rng.randint(1, 9), 0),
            Grant(about, 1, HUGE), Done(about, 0, 64), Failed(about, "no"), Cancelled(about),
            Kept(about, link), Move("prefill", rng.choice(STRANGERS), b"x"),
            Moved("decode", rng.choice(STRANGERS)), Alive(True),
        ])  # fmt: skip


def lying(geometry: Geometry) -> Geometry:
    """The same pages, and a million blocks of them, in memory that is nobody's."""
    group = geometry.groups[0]
    far = Region(1 << 46, 1 << 45, "DRAM", 0)
    many = 1 << 20
    stride = max(plane.page for plane in group.planes)
    planes = tuple(
        msgspec.structs.replace(plane, region=0, offset=index * many * stride)
        for index, plane in enumerate(group.planes)
    )
    group = msgspec.structs.replace(group, num_blocks=many, planes=planes)
    return msgspec.structs.replace(geometry, regions=(far,), groups=(group,))


def mangled(rng: random.Random, payload: bytes) -> bytes:
    """Cut off, with more behind, or with a bit turned behind the version."""
    how = rng.randrange(3)
    if how == 0:
        return payload[: rng.randrange(len(payload))]
    if how == 1:
        return payload + rng.randbytes(rng.randint(1, 9))
    at = rng.randrange(3, len(payload))
    return payload[:at] + bytes([payload[at] ^ (1 << rng.randrange(8))]) + payload[at + 1 :]


class Attacker:
    """The adversary in a process of its own; what it does goes on while the streams flow."""

    def __init__(self, stack, scene) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["neuron_push.bench.warm"])
        self._scene = scene
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        stack.callback(self.kill)
        theirs.close()
        self.address: Address = answer(self._pipe, "the adversary", 60)

    def tell(self, method, *arguments):
        """Begin something."""
        self._pipe.send((method, arguments))

    def hear(self):
        """Its result, while the streams flow."""
        self._scene.until(self._pipe.poll, what="the adversary has done it")
        return answer(self._pipe, "the adversary", 0)

    def call(self, method, *arguments):
        self.tell(method, *arguments)
        return self.hear()

    def kill(self) -> None:
        self._process.kill()
        self._process.join(10)


def _serve(pipe) -> None:
    adversary = Adversary()
    pipe.send((True, adversary.address))
    while True:
        try:
            method, arguments = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, getattr(adversary, method)(*arguments)))
        except Exception as error:  # noqa: BLE001  the test raises it again
            pipe.send((False, repr(error)))
