"""Two transfer threads over real NIXL in one process: registration, WRITE, report, pins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import pytest

from neuron_push.commands import (
    Abandon,
    Compute,
    Layers,
    Offer,
    Receive,
    Received,
    ReceiveFailed,
    Report,
    Retire,
    Settle,
    Unpinned,
    encode,
    pack_ids,
)
from neuron_push.config import Config
from neuron_push.emulation.link import linked
from neuron_push.errors import NeuronPushError
from neuron_push.geometry import Geometry, Group, Region, Semantics
from neuron_push.layouts import Place, View, split_first
from neuron_push.limits import Limits
from neuron_push.nixl import factory
from neuron_push.protocol import Address, EngineInfo, Match
from neuron_push.rendezvous import Identity
from neuron_push.sidechannel import Listener
from neuron_push.tamper import Tampering
from neuron_push.transfer import TransferThread
from neuron_push.transfer.agents import Agents
from neuron_push.transport import TransportFactory

pytestmark = pytest.mark.real_nixl

BLOCKS, HEADS, TOKENS, WIDTH, LAYERS = 32, 2, 16, 8, 2
SEMANTICS = Semantics("m", LAYERS, HEADS, WIDTH, "float32", ("full",))
MATCH = Match("transfer", "base", b"digest", 3 * TOKENS)


def engine_info(engine: str, role: str) -> EngineInfo:
    return EngineInfo(engine, 1, role, 1, 1, 1, 0, ("push",), SEMANTICS, ())


@dataclass
class Engine:
    """A listener, a transfer thread and the KV it registered."""

    thread: TransferThread
    listener: Listener
    kv: list[np.ndarray]
    heard: list[Report]

    def hears(self, wanted: Callable[[Report], bool], within: float = 10.0) -> Report:
        """Wait for a report."""
        until = time.monotonic() + within
        while time.monotonic() < until:
            self.thread.wait(0.05)
            self.heard += self.thread.take()
            for report in self.heard:
                if wanted(report):
                    return report
        raise AssertionError(f"not heard within {within} s; heard {self.heard}")


class _Tensor:
    """A numpy array as the layout builders see tensors."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape = array.shape
        self._array = array

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self._array.itemsize for step in self._array.strides)

    def data_ptr(self) -> int:
        return int(self._array.ctypes.data)

    def element_size(self) -> int:
        return int(self._array.itemsize)


def build(
    stack: ExitStack, engine: str, role: str, config: Config, listener: Listener | None = None,
    transport: TransportFactory | None = None,
) -> Engine:  # fmt: skip
    kv = [np.zeros((2, BLOCKS, HEADS, TOKENS, WIDTH), np.float32) for _ in range(LAYERS)]
    regions = tuple(Region(int(a.ctypes.data), a.nbytes, "DRAM", 0) for a in kv)
    planes = [
        plane
        for layer, array in enumerate(kv)
        for plane in split_first(
            View.of(_Tensor(array)), Place(layer, layer, int(array.ctypes.data))
        )
    ]
    group = Group("full", TOKENS, TOKENS, BLOCKS, tuple(range(HEADS)), tuple(planes))
    me = Identity(engine, 0, hash(engine) & 0xFFFFFF, SEMANTICS, Geometry(regions, (group,), 4))
    if listener is None:
        listener = Listener(engine, "127.0.0.1", 0, lambda: engine_info(engine, role))
        stack.callback(listener.close)
    thread = TransferThread(config, me, transport or factory(("UCX",)), listener.address)
    stack.callback(thread.close)
    thread.start()
    return Engine(thread, listener, kv, [])


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Engine, Engine]]:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    config = Config(lease=1.0)
    with ExitStack() as stack:
        yield build(stack, "P", "producer", config), build(stack, "D", "consumer", config)


def receive(prefill: Engine, attempt: int = 1, **changes: object) -> Receive:
    facts: dict[str, object] = {
        "attempt": attempt, "request": f"r{attempt}", "prefill": prefill.listener.address,
        "engine": "P", "match": MATCH, "start": 0, "stop": MATCH.tokens, "first": (0,),
        "blocks": (pack_ids([7, 3, 9]),), "pin": attempt, "patience": 5.0,
    }  # fmt: skip
    return Receive(**{**facts, **changes})  # type: ignore[arg-type]


def settled(source: int = 1) -> list[Offer | Settle | Retire]:
    return [
        Offer(source, "p", MATCH),
        Settle(source, MATCH.tokens, (0,), (pack_ids([4, 5, 2]),), 70 + source, True),
        Retire(source, "finished"),
    ]


def fill(prefill: Engine) -> None:
    for layer, array in enumerate(prefill.kv):
        array[:] = np.random.default_rng(layer).random(array.shape, np.float32)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_what_prefill_computed_arrives_in_the_registered_blocks(
    pair: tuple[Engine, Engine], first: str
) -> None:
    prefill, decode = pair
    fill(prefill)
    if first == "prefill":
        prefill.thread.submit(encode(settled()))
    decode.thread.submit(encode([receive(prefill)]))
    if first == "decode":
        prefill.thread.submit(encode(settled()))
    decode.hears(lambda report: report == Received(1, "r1"))
    decode.hears(lambda report: report == Unpinned(1))
    prefill.hears(lambda report: report == Unpinned(71))
    for ours, theirs in zip(decode.kv, prefill.kv, strict=True):
        assert (ours[:, [7, 3, 9]] == theirs[:, [4, 5, 2]]).all()
        rest = np.setdiff1d(np.arange(BLOCKS), [7, 3, 9])
        assert not ours[:, rest].any()


def test_every_metric_that_counts_bytes_moves(pair: tuple[Engine, Engine]) -> None:
    """The others are those of the state machines (tests/rendezvous/test_random.py)."""
    prefill, decode = pair
    fill(prefill)
    prefill.thread.submit(encode(settled()))
    decode.thread.submit(encode([receive(prefill)]))
    decode.hears(lambda report: report == Received(1, "r1"))
    prefill.hears(lambda report: report == Unpinned(71))
    sent, sizes = prefill.thread.tally.take()
    got, _ = decode.thread.tally.take()
    nbytes = MATCH.tokens * 2 * HEADS * WIDTH * 4 * LAYERS
    assert sent["bytes"][""] == got["received_bytes"][""] == nbytes
    assert sent["copies"][""] == sum(sizes["transfer_copies_size"]) > 0


def test_a_finished_prompt_is_read_from_its_blocks_and_then_let_go(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    fill(prefill)
    prefill.thread.submit(encode(settled()))
    blocks = (pack_ids([3, 9]),)
    pull = receive(prefill, start=TOKENS, first=(1,), blocks=blocks, pull=True)
    decode.thread.submit(encode([pull]))
    decode.hears(lambda report: report == Received(1, "r1"))
    decode.hears(lambda report: report == Unpinned(1))
    prefill.hears(lambda report: report == Unpinned(71))
    for ours, theirs in zip(decode.kv, prefill.kv, strict=True):
        assert (ours[:, [3, 9]] == theirs[:, [5, 2]]).all()
        assert not ours[:, np.setdiff1d(np.arange(BLOCKS), [3, 9])].any()
    counters, _ = prefill.thread.tally.take()
    assert "bytes" not in counters, "prefill wrote nothing"


def pull_compared(
    stack: ExitStack, *, at_prefill: bool = True, tampered: bool = False
) -> tuple[Engine, Engine, Report]:
    """A pull with digests: both engines, and how it ended."""
    plain = factory(("UCX",))
    prefill = build(stack, "P", "producer", Config(kv_digest=at_prefill))
    decode = build(stack, "D", "consumer", Config(kv_digest=True, slice_bytes=1 << 16),
                   transport=Tampering(plain) if tampered else plain)  # fmt: skip
    fill(prefill)
    prefill.thread.submit(encode(settled()))
    decode.thread.submit(encode([receive(prefill, pull=True)]))
    ended = decode.hears(lambda report: isinstance(report, Received | ReceiveFailed))
    decode.hears(lambda report: report == Unpinned(1))
    prefill.hears(lambda report: report == Unpinned(71))
    return prefill, decode, ended


def test_what_is_pulled_is_compared_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with ExitStack() as stack:
        prefill, decode, ended = pull_compared(stack)
        assert ended == Received(1, "r1")
        for ours, theirs in zip(decode.kv, prefill.kv, strict=True):
            assert (ours[:, [7, 3, 9]] == theirs[:, [4, 5, 2]]).all()


def test_a_byte_that_was_turned_fails_what_is_pulled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with ExitStack() as stack:
        _, decode, ended = pull_compared(stack, tampered=True)
        assert isinstance(ended, ReceiveFailed)
        assert "tokens 0 to 48 is not what prefill sent (digest)" in ended.reason
        counters, _ = decode.thread.tally.take()
        assert counters["cancellations"] == {"digest": 1}


def test_a_prefill_engine_without_digests_cannot_serve_a_pull_that_is_compared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with ExitStack() as stack:
        _, _, ended = pull_compared(stack, at_prefill=False)
        assert isinstance(ended, ReceiveFailed)
        assert "kv_digest is not set there" in ended.reason


def test_a_prompt_still_being_computed_is_read_once_it_is_settled(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    decode.thread.submit(encode([receive(prefill, pull=True)]))
    assert not decode.thread.wait(0.3)
    fill(prefill)
    prefill.thread.submit(encode(settled()))
    decode.hears(lambda report: report == Received(1, "r1"))
    assert (decode.kv[0][:, 7] == prefill.kv[0][:, 4]).all()


class Fence:
    """One that a test opens."""

    open = False

    def done(self) -> bool:
        return self.open

    def wait(self, timeout_s: float) -> bool:
        return self.open


def test_layers_travel_before_the_step_has_ended_and_none_before_its_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    config = Config(lease=1.0, streaming="layer")
    with ExitStack() as stack:
        prefill = build(stack, "P", "producer", config)
        decode = build(stack, "D", "consumer", config)
        decode.thread.submit(encode([receive(prefill)]))
        fill(prefill)
        blocks, none, fences = (pack_ids([4, 5, 2]),), (b"",), [Fence(), Fence()]
        compute = Compute(1, MATCH.tokens, (0,), blocks, 71, 1)
        prefill.thread.submit(encode([Offer(1, "p", MATCH), compute]))
        prefill.thread.submit(encode([Layers(1, 1)]), fences[0])
        settle = Settle(1, MATCH.tokens, (3,), none, 71, True)
        prefill.thread.submit(encode([settle, Retire(1, "finished")]), fences[1])
        assert not decode.thread.wait(0.3) and not decode.kv[0].any()
        fences[0].open = True
        until(lambda: (decode.kv[0][:, 9] == prefill.kv[0][:, 2]).all())
        assert not decode.kv[1].any(), "the second layer is still being computed"
        assert not decode.thread.wait(0.1)
        fences[1].open = True
        decode.hears(lambda report: report == Received(1, "r1"))
        for ours, theirs in zip(decode.kv, prefill.kv, strict=True):
            assert (ours[:, [7, 3, 9]] == theirs[:, [4, 5, 2]]).all()
        counters, _ = prefill.thread.tally.take()
        assert counters["bytes"][""] == 3 * HEADS * TOKENS * WIDTH * 4 * 2 * LAYERS, (
            "each byte once"
        )


class _Crawl:
    """A link on which a WRITE takes a minute."""

    def transfer(self, nbytes: int) -> float:
        return 60.0 if nbytes else 0.0


def test_a_slow_link_never_makes_prefills_loop_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    tokens = (BLOCKS - 1) * TOKENS
    match = Match("long", "base", b"digest", tokens)
    with ExitStack() as stack:
        crawling = linked(factory(("UCX",)), _Crawl())  # type: ignore[arg-type]
        prefill = build(stack, "P", "producer", Config(), transport=crawling)
        decode = build(stack, "D", "consumer", Config())
        blocks = (pack_ids(list(range(1, BLOCKS))),)
        decode.thread.submit(encode([receive(prefill, match=match, stop=tokens, blocks=blocks)]))
        prefill.thread.submit(encode([Offer(1, "p", match)]))
        until(lambda: bool(prefill.thread._core.producer.sendings))
        took = []
        for step in range(1, BLOCKS):
            stop = step * TOKENS
            settle = Settle(1, stop, (step - 1,), (pack_ids([step]),), 71, stop == tokens)
            began = time.perf_counter()
            prefill.thread.submit(encode([settle]))
            took.append(time.perf_counter() - began)
            time.sleep(0.001)
        until(lambda: prefill.thread._core.producer.writes)
        assert sorted(took)[len(took) // 2] < 0.005
        sending = next(iter(prefill.thread._core.producer.sendings.values()))
        assert len(sending.writes) <= Config().writes_in_flight and not sending.landed.covers(0, 1)


def until(reached: Callable[[], bool], within: float = 10.0) -> None:
    end = time.monotonic() + within
    while not reached():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_nothing_is_sent_before_the_fence_is_done(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    fence = Fence()
    decode.thread.submit(encode([receive(prefill)]))
    prefill.thread.submit(encode(settled()), fence)
    assert not decode.thread.wait(0.3)
    fill(prefill)
    fence.open = True
    decode.hears(lambda report: report == Received(1, "r1"))
    assert (decode.kv[0][:, 7] == prefill.kv[0][:, 4]).all()


def test_an_abandoned_attempt_is_reported_at_once_and_unpinned_when_quiet(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    decode.thread.submit(encode([receive(prefill)]))
    decode.thread.submit(encode([Abandon(1, "the client left")]))
    report = decode.hears(lambda report: isinstance(report, ReceiveFailed))
    assert isinstance(report, ReceiveFailed) and report.reason == "the client left"
    decode.hears(lambda report: report == Unpinned(1))


def test_a_lease_ends_a_prompt_that_nobody_wants(pair: tuple[Engine, Engine]) -> None:
    prefill, _ = pair
    prefill.thread.submit(encode(settled()))
    prefill.hears(lambda report: report == Unpinned(71), within=4.0)


def test_a_wrong_engine_is_named(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    decode.thread.submit(encode([receive(prefill, engine="Q")]))
    report = decode.hears(lambda report: isinstance(report, ReceiveFailed))
    assert isinstance(report, ReceiveFailed) and "P" in report.reason and "Q" in report.reason


def test_a_defect_in_one_transfer_fails_that_one_only(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    fill(prefill)
    registrations = decode.thread._core.consumer.registrations
    build = registrations.build
    monkeypatch.setattr(
        registrations, "build",
        lambda attempt, *rest: 1 / 0 if attempt.command.attempt == 1 else build(attempt, *rest),
    )  # fmt: skip
    decode.thread.submit(encode([receive(prefill, 1)]))
    decode.hears(lambda report: isinstance(report, ReceiveFailed) and report.attempt == 1)
    prefill.thread.submit(encode(settled()))
    decode.thread.submit(encode([receive(prefill, 2)]))
    decode.hears(lambda report: report == Received(2, "r2"))


def test_a_thread_that_cannot_start_says_why() -> None:
    def broken(name: object, regions: object) -> object:
        raise NeuronPushError("no such backend")

    geometry = Geometry((), (), 4)
    me = Identity("X", 0, 1, SEMANTICS, geometry)
    thread = TransferThread(Config(), me, broken, Address("127.0.0.1", 1))  # type: ignore[arg-type]
    with pytest.raises(NeuronPushError, match="no such backend"):
        thread.start()
    thread.close()


def test_a_thread_that_comes_up_too_late_ends_and_leaves_no_agent() -> None:
    let, closed = threading.Event(), threading.Event()

    class Late:
        def __init__(self, name: str, regions: object) -> None:
            let.wait(10)

        def metadata(self) -> bytes:
            return b"late"

        def notifications(self) -> list[object]:
            return []

        def close(self) -> None:
            closed.set()

    me = Identity("X", 0, 1, SEMANTICS, Geometry((), (), 4))
    thread = TransferThread(Config(), me, Late, Address("127.0.0.1", 1))  # type: ignore[arg-type]
    with pytest.raises(TimeoutError):
        thread.start(timeout=0.05)
    let.set()
    assert closed.wait(10)
    thread.close()


def test_an_idle_pair_uses_hardly_any_processor(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    prefill.thread.submit(encode(settled()))
    decode.thread.submit(encode([receive(prefill)]))
    decode.hears(lambda report: report == Received(1, "r1"))
    decode.hears(lambda report: report == Unpinned(1))
    began, used = time.monotonic(), time.process_time()
    assert not decode.thread.wait(2.0)  # nothing more is reported
    share = (time.process_time() - used) / (time.monotonic() - began)
    assert share < 0.05  # two threads; the figure itself is printed by `bench hooks`


def test_an_engine_whose_ranks_are_still_starting_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    with ExitStack() as stack:
        config = Config()
        decode = build(stack, "D", "consumer", config)
        early = Listener("P", "127.0.0.1", 0, lambda: engine_info("P", "producer"))
        stack.callback(early.close)
        decode.thread.submit(encode([receive(Engine(decode.thread, early, [], []))]))
        assert not decode.thread.wait(0.5)  # it is there, but has no ranks yet
        prefill = build(stack, "P", "producer", config, early)
        fill(prefill)
        prefill.thread.submit(encode(settled()))
        decode.hears(lambda report: report == Received(1, "r1"))


def test_what_a_dead_thread_gives_up_is_told_once_its_agents_are_gone(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = pair
    told: list[list[Report]] = []
    destroy = Agents.destroy

    def watched(agents: Agents) -> None:
        destroy(agents)
        told.append(decode.thread.take())

    monkeypatch.setattr(Agents, "destroy", watched)
    decode.thread.submit(encode([receive(prefill, hold_failure=True)]))

    def broken(now: float) -> list[object]:
        if decode.thread._core.consumer.attempts:
            raise MemoryError("a defect")
        return []

    monkeypatch.setattr(decode.thread._core, "tick", broken)
    report = decode.hears(lambda report: isinstance(report, ReceiveFailed))
    assert isinstance(report, ReceiveFailed) and "a defect" in report.reason
    assert told == [[]]
    assert decode.thread.stands == 0.0


@pytest.mark.parametrize("short", ["D", "P"])
def test_a_registration_longer_than_the_configured_limit_fails_with_the_setting(
    monkeypatch: pytest.MonkeyPatch, short: str
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    most = {"D": Config(), "P": Config(), short: Config(limits=Limits(notification=300))}
    with ExitStack() as stack:
        prefill = build(stack, "P", "producer", most["P"])
        decode = build(stack, "D", "consumer", most["D"])
        match = Match("t" * 400, "base", b"digest", MATCH.tokens)
        decode.thread.submit(encode([receive(prefill, match=match, patience=1.0)]))
        report = decode.hears(lambda report: isinstance(report, ReceiveFailed))
        assert isinstance(report, ReceiveFailed)
        assert ("limits.notification" in report.reason) == (short == "D")
        decode.hears(lambda report: report == Unpinned(1))
