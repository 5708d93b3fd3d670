"""The worker half under the recorded and derived hook orders of every supported runner."""

import pickle
import types

import pytest
from msgspec.structs import replace

from neuron_push.commands import (
    Abandon,
    Compute,
    Layers,
    Near,
    Offer,
    Receive,
    Received,
    ReceiveFailed,
    Retire,
    Settle,
    Unpinned,
    decode,
    pack_ids,
)
from neuron_push.config import Config
from neuron_push.errors import DeadlineExceeded
from neuron_push.protocol import Address, Match
from neuron_push.transfer import Tally
from neuron_push.vllm.compat import FAILS_BY_REQUEST
from neuron_push.vllm.metadata import IDLE, NOTHING, StepMeta, WorkerMeta
from neuron_push.vllm.worker import QUIET, WorkerHalf
from tests.vllm_hooks import load_traces

MATCH = Match("t", "r", b"", 100)
SETTLE = Settle(1, 64, (0,), (pack_ids([1, 2]),), 5, False)
OFFER, NEAR, RETIRE = Offer(1, "p", MATCH), Near(1), Retire(1, "finished")
TRACES = load_traces()


class Thread:
    """Where the transfer thread would be: notes what is handed over, and when."""

    def __init__(self, log):
        self.log = log
        self.woken = []
        self.reports = []
        self.failure = None
        self.stands = 0.0
        self.doing = "Notify P"
        self.tally = Tally()

    @property
    def news(self):
        return bool(self.reports)

    def submit(self, commands, fence=None, *, wake=True):
        self.woken.append(wake)
        for command in decode(commands):
            self.log.append(("submit", type(command), command, fence))

    def take(self):
        reports, self.reports = self.reports, []
        return reports

    def wait(self, timeout):
        self.log.append(("wait", timeout))
        return bool(self.reports)

    def close(self):
        self.log.append(("close",))


class Accelerator:
    """Numbers its fences."""

    name = "fake"
    hides_end = False

    def __init__(self, log):
        self.log = log
        self.fences = 0

    def record_fence(self):
        self.fences += 1
        self.log.append(("fence", self.fences))
        return self.fences


def half_with(log, *, drafts=False, rank=0):
    model = types.SimpleNamespace(model="m")
    draft = types.SimpleNamespace(method="eagle", draft_model_config=model)
    config = types.SimpleNamespace(
        kv_transfer_config=types.SimpleNamespace(engine_id="e"),
        speculative_config=draft if drafts else None,
    )
    half = WorkerHalf(config, None, Config(accelerator="cpu"))
    half._accelerator, half._thread, half._rank = Accelerator(log), Thread(log), rank
    return half


def receive(attempt, request, blocks=(7, 8), start=0, stop=30):
    return Receive(
        attempt, request, Address("h", 1), "", MATCH, start, stop, (0,), (pack_ids(blocks),),
        attempt, 5.0,
    )  # fmt: skip


@pytest.fixture
def log():
    return []


@pytest.fixture
def half(log):
    return half_with(log)


def reported(half, finished=()):
    """(requests sent, requests whose load ended, those that failed) of one step."""
    found = half.results(finished)
    return found.finished_sending, found.finished_recving, found.failed_recving


def submitted(log):
    return [entry[2] for entry in log if entry[0] == "submit"]


# ---------------------------------------------------------------------- replayed traces


class Replay:
    """One rank of a trace with commands in every step: a registration, a settled chunk."""

    CALLS = types.MappingProxyType(
        {
            "finish_forward": WorkerHalf.finish_forward,
            "wait_for_save": WorkerHalf.settle,
            "get_transfer_results": WorkerHalf.results,
            "get_finished": WorkerHalf.results,
            "get_block_ids_with_load_errors": WorkerHalf.bad_blocks,
            "get_kv_connector_stats": WorkerHalf.stats,
            "build_connector_worker_meta": WorkerHalf.worker_meta,
        }
    )

    def __init__(self, trace, side):
        self.log = []
        self.half = half_with(self.log, drafts="draft" in trace.case)
        self.reported = []
        self.idle = []
        self.steps = 0
        for step in trace.steps:
            meta = [call for call in step if call.hook == "build_connector_meta"]
            scheduled = bool(meta and meta[0].detail.get("scheduled"))
            for call in step:
                if call.side == side:
                    self.call(call, scheduled)
        self.half.bind(NOTHING)  # the engine's next step, whenever it comes

    def call(self, call, scheduled):
        self.log.append(("hook", call.hook, call.detail))
        if call.hook == "bind_connector_metadata":
            self.steps += 1
            number = self.steps
            self.idle.append(not scheduled)
            commands = (
                receive(number, f"d{number}"),
                Settle(number, 64, (0,), (pack_ids([1]),), 1000 + number, False),
                Retire(number, "finished"),
            )
            self.half.bind(StepMeta.of(commands, idle=not scheduled))
            self.half._thread.reports += [Received(number, f"d{number}")] * 2
        elif call.hook in self.CALLS:
            found = self.CALLS[call.hook](self.half)
            if call.hook in ("get_transfer_results", "get_finished"):
                self.reported += found.finished_recving
                assert not found.finished_sending and not found.failed_recving


def replays():
    for trace in TRACES:
        for side in sorted({call.side for step in trace.steps for call in step} - {"scheduler"}):
            yield pytest.param(trace, side, id=f"{trace.name}-{side}")


@pytest.mark.parametrize(("trace", "side"), replays())
def test_a_runners_order(trace, side):
    replay = Replay(trace, side)
    log, steps = replay.log, replay.steps
    assert steps
    spots = {
        (entry[1], getattr(entry[2], "attempt", None) or getattr(entry[2], "source", 0)): index
        for index, entry in enumerate(log)
        if entry[0] == "submit"
    }
    binds = [i for i, e in enumerate(log) if e[:2] == ("hook", "bind_connector_metadata")]
    for number, bind in enumerate(binds, 1):
        # Registrations leave in bind itself: before any layer and any later hook.
        assert not any(entry[0] == "hook" for entry in log[bind + 1 : spots[Receive, number]])
        # Settled chunks leave at one later hook, all together and behind one fence.
        settle, retire = spots[Settle, number], spots[Retire, number]
        assert settle > spots[Receive, number]
        assert retire == settle + 1
        fence = log[settle][3]
        assert fence == log[retire][3]
        assert log[settle - 1] == ("fence", fence)
        at = max(i for i, e in enumerate(log[:settle]) if e[0] == "hook")
        next_bind = binds[number] if number < len(binds) else len(log)
        assert bind < at <= next_bind
        forward = [
            i
            for i in range(bind, next_bind)
            if log[i][0] == "hook" and log[i][1] in ("save_kv_layer", "wait_for_layer_load")
        ]
        drafts = "draft" in trace.case
        if forward and (drafts or log[at][1] != "finish_forward"):
            assert at > max(forward)
        allowed = {"wait_for_save", "bind_connector_metadata"} | (
            set() if drafts else {"finish_forward"}
        )
        hooks = {log[i][1] for i in range(bind + 1, next_bind) if log[i][0] == "hook"}
        late_hooks = hooks & allowed
        if late_hooks and at != next_bind:
            assert log[at][1] in allowed
            first = min(
                i for i in range(bind + 1, next_bind)
                if log[i][0] == "hook" and log[i][1] in allowed
            )  # fmt: skip
            assert at == first
    # Nothing is handed over twice, every load is reported exactly once.
    assert len(spots) == 3 * steps == len(submitted(log))
    assert sorted(replay.reported) == sorted({*replay.reported})
    assert {f"d{n}" for n in range(1, steps)} <= {*replay.reported}


@pytest.mark.parametrize(("trace", "side"), replays())
def test_only_steps_that_compute_nothing_wait(trace, side):
    replay = Replay(trace, side)
    step, waited = 0, set()
    for entry in replay.log:
        if entry[:2] == ("hook", "bind_connector_metadata"):
            step += 1
        elif entry[0] == "wait":
            waited.add(step)
    assert waited <= {n for n, idle in enumerate(replay.idle, 1) if idle}


def test_the_traces_hold_the_orders_that_matter():
    names = {trace.name for trace in TRACES}
    assert len({trace.vllm for trace in TRACES}) >= 2
    for runner in ("v1", "v2"):
        assert any(f"/{runner}-pp2" in name for name in names)
    assert any("pp2-spec" in name for name in names)
    assert any("spec-draft-model" in name for name in names)


# ---------------------------------------------------------------------- settle point


def test_prefill_commands_wait_for_the_settle_point_and_offers_do_not(half, log):
    half.bind(StepMeta.of((OFFER, NEAR, SETTLE, RETIRE, receive(1, "d"), Abandon(9, "x"))))
    assert [type(c) for c in submitted(log)] == [Offer, Near, Receive, Abandon]
    half.finish_forward()
    half.settle()
    half.settle()
    assert [type(c) for c in submitted(log)[4:]] == [Settle, Retire]
    assert [entry for entry in log if entry[0] == "fence"] == [("fence", 1)]


def test_a_layer_settles_those_before_it_once_and_only_in_steps_that_stream_layers(half, log):
    half._part_of = {"a": 0, "b": 0, "c": 1, "d": 2}
    compute = Compute(1, 64, (0,), (pack_ids([1, 2]),), 5, 9)
    for name in "abcd":
        half.layer(name)
    half.bind(StepMeta.of((SETTLE,)))
    for name in "abcd":
        half.layer(name)
    half.settle()
    assert [type(c) for c in submitted(log)] == [Settle]
    half.bind(pickle.loads(pickle.dumps(StepMeta.of((compute, SETTLE)))))
    for name in "abbcccd":
        half.layer(name)
    half.settle()
    half.layer("d")
    assert submitted(log)[1:] == [compute, Layers(9, 1), Layers(9, 2), SETTLE]
    fences = [entry[3] for entry in log if entry[0] == "submit"]
    assert fences == [1, None, 2, 3, 4]


def test_draft_layers_are_written_after_the_forward_of_the_target(log):
    half = half_with(log, drafts=True)
    half.bind(StepMeta.of((SETTLE,)))
    half.finish_forward()
    assert not submitted(log)
    half.settle()
    assert submitted(log) == [SETTLE]


def test_a_runner_without_a_late_hook_settles_at_the_next_bind(half, log):
    half.bind(StepMeta.of((SETTLE,)))
    half.bind(StepMeta.of((receive(1, "d"),)))
    assert [type(c) for c in submitted(log)] == [Settle, Receive]


def test_steps_without_commands_record_no_fence(half, log):
    for _ in range(3):
        half.bind(NOTHING)
        half.finish_forward()
        half.settle()
        assert reported(half) == (set(), set(), set())
        assert half.worker_meta() is None
        assert half.stats() is None
    assert not log


# ---------------------------------------------------------------------- reports


def test_loads_end_once_whatever_the_thread_repeats(half):
    half.bind(StepMeta.of((receive(1, "a"), receive(2, "b", blocks=(9,)))))
    half._thread.reports = [
        Received(1, "a"), Received(1, "a"), ReceiveFailed(2, "b", "why", True), Received(2, "b"),
        Received(77, "stranger"),
    ]  # fmt: skip
    assert reported(half) == (set(), {"a", "b"}, {"b"})
    assert half.bad_blocks() == (set() if FAILS_BY_REQUEST else {9})
    assert half.bad_blocks() == set()
    assert reported(half) == (set(), set(), set())


@pytest.mark.parametrize("commands", [(), (SETTLE,)], ids=["a step without tokens", "with some"])
def test_a_load_is_told_in_the_first_step_after_its_notification(half, commands):
    half.bind(StepMeta.of((receive(1, "d"),)))
    half.results()
    half.bind(StepMeta.of(commands, idle=not commands))
    if commands:  # the notification comes during the forward
        half._thread.reports.append(Received(1, "d"))
    else:  # or while the step waits for it
        half._thread.wait = lambda timeout: half._thread.reports.append(Received(1, "d"))
    half.settle()
    assert "d" in set().union(*reported(half))


def test_a_declined_registration_is_never_reported(half):
    half.bind(StepMeta.of((receive(1, "a", blocks=(), stop=0),)))
    half._thread.reports = [ReceiveFailed(1, "a", "unreachable", True)]
    assert reported(half) == (set(), set(), set())


def test_rejections_fail_at_once_and_without_waiting(half, log):
    half.bind(StepMeta.of((), (("bad", "why", (3, 4)),), idle=True))
    assert reported(half) == (set(), {"bad"}, {"bad"})
    assert half.bad_blocks() == (set() if FAILS_BY_REQUEST else {3, 4})
    assert not log
    assert reported(half) == (set(), set(), set())


def test_an_only_rank_tells_plainly_what_others_tell_to_be_joined(log):
    half = half_with(log)
    half._alone = True
    half._thread.reports = [Unpinned(5)]
    half.results()
    assert half.worker_meta() == WorkerMeta(((5, half._rank),)).told
    assert half.worker_meta() is None


def test_pins_are_told_with_the_rank_and_once(log):
    half = half_with(log, rank=3)
    half._thread.reports = [Unpinned(5), Unpinned(6)]
    half.results()
    assert half.worker_meta().unpinned == ((5, 3), (6, 3))
    assert half.worker_meta() is None


def test_a_request_whose_blocks_vllm_keeps_is_reported_sent_once(log):
    half = half_with(log, rank=2)
    half.bind(StepMeta.of((RETIRE,), handed=((5, "p"),)))
    assert reported(half, {"p"}) == (set(), set(), set())
    half._thread.reports = [Unpinned(6), Unpinned(5), Unpinned(5)]
    assert reported(half) == ({"p"}, set(), set())
    assert half.worker_meta().unpinned == ((6, 2), (5, 2))  # repeats are harmless
    assert reported(half) == (set(), set(), set())


def test_a_request_that_is_sent_before_it_has_left_is_reported_when_it_has(log):
    half = half_with(log, rank=2)
    half.bind(StepMeta.of((SETTLE, RETIRE), handed=((5, "p"), (7, "q"))))
    half._thread.reports = [Unpinned(5), Unpinned(7)]
    assert reported(half) == (set(), set(), set())
    half.bind(StepMeta.of((), handed=((7, ""),)))  # vLLM frees these blocks itself
    assert reported(half, {"p", "q"}) == ({"p"}, set(), set())
    assert half.worker_meta().unpinned == ((7, 2),)


def test_a_dead_thread_fails_what_is_under_way_and_what_comes_after(half):
    half.bind(StepMeta.of((receive(1, "a"),)))
    half._thread.failure = RuntimeError("no memory")
    half.bind(StepMeta.of((receive(2, "b"),)))
    half._thread.reports = [ReceiveFailed(1, "a", "stopped", False)]
    assert reported(half) == (set(), {"a", "b"}, {"a", "b"})
    assert reported(half) == (set(), set(), set())
    meta = half.worker_meta()  # says why, and lets no pin go
    assert meta is None or (meta.failures and not meta.unpinned)


def test_a_thread_that_one_call_keeps_ends_what_waits_for_it(half, log):
    held = replace(receive(2, "b"), hold_failure=True)  # vLLM would compute into its blocks
    half.bind(StepMeta.of((receive(1, "a"), held)))
    half._thread.stands = half._config.stall - 1
    assert reported(half) == (set(), set(), set())
    half._thread.stands = half._config.stall + 1
    assert reported(half) == (set(), {"a"}, {"a"})
    assert "in one call for 11 s (Notify P)" in half.worker_meta().failures[0][1]
    assert [c.attempt for c in submitted(log) if isinstance(c, Abandon)] == [1]
    half.bind(StepMeta.of((receive(3, "c"),)))
    assert reported(half) == (set(), {"c"}, {"c"})  # nor does a new one wait
    half._thread.stands = 0.0
    half._thread.reports = [ReceiveFailed(1, "a", "abandoned", True), Unpinned(1), Received(2, "b")]
    assert reported(half) == (set(), {"b"}, set())  # nobody is told twice
    assert (1, 0) in half.worker_meta().unpinned


def test_an_engine_whose_thread_never_comes_back_stops_with_the_reason(half):
    half.bind(StepMeta.of((replace(receive(1, "a"), hold_failure=True),)))
    half._thread.stands = half._config.stall_most - 1
    assert reported(half) == (set(), set(), set())
    half._thread.stands = half._config.stall_most + 1
    with pytest.raises(DeadlineExceeded, match=r"Notify P.*restart this engine"):
        half.results()


def test_a_process_that_was_stopped_itself_fails_nothing(half, log):
    half.bind(StepMeta.of((receive(1, "a"),)))
    for stands in (0.001, half._config.stall_most + 5, half._config.stall_most + 5.01, 0.002):
        half._thread.stands = stands
        assert reported(half) == (set(), set(), set())
    half._thread.reports = [Received(1, "a")]
    assert reported(half)[1] == {"a"} and not [c for c in submitted(log) if isinstance(c, Abandon)]


def test_waits_are_longer_when_nothing_happens(half, log, monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("neuron_push.vllm.worker.time.monotonic", lambda: now[0])
    config = half._config
    half.bind(StepMeta.of((receive(1, "a"),), idle=True))
    half._thread.reports = [Received(1, "a")]
    half.results()
    half.bind(IDLE)
    half.results()
    half.results()
    now[0] += QUIET + 0.1
    half.results()
    waits = [entry[1] for entry in log if entry[0] == "wait"]
    assert waits == [config.step_wait, config.step_wait_idle]


def test_the_step_after_one_that_reported_does_not_wait(half, log):
    half.bind(StepMeta.of((receive(1, "a"),), idle=True))
    half._thread.reports = [Received(1, "a")]
    assert reported(half)[1] == {"a"}
    log.clear()
    half.bind(IDLE)
    half.results()  # vLLM takes up what was reported once this step is over
    assert not [entry for entry in log if entry[0] == "wait"]
    half.results()
    assert [entry for entry in log if entry[0] == "wait"]


@pytest.mark.parametrize(
    ("commands", "woken"),
    [
        ((receive(1, "d"),), [True]),
        ((Abandon(1, "x"),), [False]),
        ((OFFER, SETTLE), [False, False]),
        ((NEAR, replace(SETTLE, last=True)), [False, True]),
        ((RETIRE,), [True]),
    ],
)
def test_the_thread_is_woken_for_registrations_and_ends_of_prompts_only(half, commands, woken):
    for _ in range(2):
        half.bind(StepMeta.of(commands))
        half.settle()
    assert half._thread.woken == woken * 2


def test_measurements_are_taken_once(half):
    half._thread.tally.add("bytes", 5)
    assert half.stats().data["counters"] == {"bytes": {"": 5}}
    assert half.stats() is None


def test_closing_closes_the_thread(half, log):
    half.close()
    assert log == [("close",)]
