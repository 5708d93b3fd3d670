"""No block is handed out while a transfer may read or write it, whatever vLLM's scheduler does.

The real scheduler, with the workers played: a watch on its block pool knows which blocks were
told to the transfer threads and which pins are quiet.
"""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.request import RequestStatus

from neuron_push.commands import Receive, Retire, Settle
from neuron_push.vllm import compat, custody
from neuron_push.vllm.custody import Custody
from neuron_push.vllm.metadata import StepMeta
from neuron_push.vllm.pins import Pins
from neuron_push.vllm.prefills import Prefills
from tests.vllm.kit import DECODE, PREFILL, Engine, of_kind, preempt_all

asks = pytest.mark.skipif(not compat.ASKS_BEFORE_PREEMPTING, reason="0.29 does not ask")


class Watch:
    """Blocks under transfer, by pin; notes every one that the pool hands out regardless."""

    def __init__(self, engine):
        self.engine = engine
        self.told: dict[int, set[int]] = {}
        self.over: set[int] = set()  # pins whose source has retired, or whose attempt may end
        self.loading: dict[str, int] = {}  # pins of registered requests
        self.given_twice: list[int] = []
        hand_out = engine.pool.get_new_blocks

        def watched(number):
            blocks = hand_out(number)
            busy = set().union(*self.told.values()) if self.told else set()
            self.given_twice += [block.block_id for block in blocks if block.block_id in busy]
            return blocks

        engine.pool.get_new_blocks = watched

    def read(self, meta):
        sources = {}
        for command in of_kind(meta, Settle | Receive | Retire):
            if isinstance(command, Settle):
                self.told.setdefault(command.pin, set()).update(command.blocks[0])
                self.engine.sources[command.source] = command.pin
            elif isinstance(command, Retire):
                sources[command.source] = command
            elif command.start < command.stop:
                self.told[command.pin] = set(command.blocks[0])
                self.loading[command.request] = command.pin
        for source in sources:
            if (pin := self.engine.sources.pop(source, None)) is not None:
                self.over.add(pin)

    def quiet(self, pins):
        for pin in pins:
            self.told.pop(pin, None)
            self.over.discard(pin)
        return tuple((pin, 0) for pin in pins)


def nothing(*_):
    """What a mutant does instead."""


@pytest.fixture
def start():
    engines = []

    def make(blocks=24, **options):
        engine = Engine(blocks, **{"tokens": 64, **options})
        engine.scheduler.scheduler_reserve_full_isl = False
        engine.sources = {}
        engines.append(engine)
        return engine, Watch(engine)

    yield make
    for engine in engines:
        engine.close()


def step(engine, watch, **told):
    output, meta = engine.schedule()
    watch.read(meta)
    engine.update(output, **told)
    return output


def references(engine, pin_blocks):
    return {engine.pool.blocks[block].ref_cnt for block in pin_blocks}


# ---------------------------------------------------------------------- one at a time


@asks
def test_a_running_prompt_costs_no_references(start):
    engine, watch = start(role="kv_producer")
    engine.add(200, PREFILL)
    step(engine, watch)
    (blocks,) = watch.told.values()
    assert references(engine, blocks) == {1}
    assert not engine.connector.has_pending_block_frees()
    assert references(engine, blocks) == {2}


@asks
@pytest.mark.parametrize("output", [1, 2])
def test_vllm_keeps_a_finished_prompt_until_it_is_sent(start, output):
    engine, watch = start(role="kv_producer")
    request = engine.add(40, PREFILL, output=output)
    told = []
    while not request.is_finished():
        scheduled, meta = engine.schedule()
        watch.read(meta)
        engine.update(scheduled)
        told += [meta.handed]
    (pin, blocks), *_ = watch.told.items()
    assert references(engine, blocks) == {1}
    assert engine.scheduler.has_finished_requests()
    scheduled, meta = engine.schedule()
    told += [meta.handed]
    # With the prompt's last step if that ends the request, and else once it has ended.
    handed = ((pin, request.request_id),)
    assert told == ([handed, ()] if output == 1 else [(), (), handed])
    engine.update(scheduled, unpinned=watch.quiet([pin]))
    assert engine.held == 0
    assert not engine.scheduler.requests
    assert not engine.connector.has_pending_push_work()


@asks
@pytest.mark.parametrize("quiet", ["before", "after"])
def test_a_prompt_that_is_sent_before_its_request_has_ended(start, quiet):
    """Asynchronous scheduling: the output of the prompt's last step is still to come."""
    engine, watch = start(role="kv_producer")
    request = engine.add(40, PREFILL)
    scheduled, meta = engine.schedule()
    watch.read(meta)
    (pin,) = watch.told
    unpinned = watch.quiet([pin]) if quiet == "before" else ()
    engine.update(scheduled, unpinned=unpinned)
    assert request.request_id in engine.scheduler.requests
    assert engine.held == 3
    step(engine, watch, unpinned=watch.quiet([pin]) if quiet == "after" else ())
    assert not engine.scheduler.requests
    assert engine.held == 0
    assert not engine.half._pins


@asks
@pytest.mark.parametrize("quiet", [True, False])
@pytest.mark.parametrize("end", ["preempted", "aborted"])
def test_a_prompt_whose_request_does_not_end_as_expected_is_taken_back(start, end, quiet):
    engine, watch = start(role="kv_producer")
    request = engine.add(40, PREFILL)
    scheduled, meta = engine.schedule()
    watch.read(meta)
    (pin,) = watch.told
    if quiet:  # its workers keep that to themselves
        told = engine._as_workers_say((), unpinned=watch.quiet([pin]))
        assert not told["sent"] and not told["unpinned"]
    if end == "aborted":
        engine.abort(request)
    else:
        preempt_all(engine)
        engine.update(scheduled)
    engine.add([6] * 100)
    scheduled, meta = engine.schedule()
    watch.read(meta)
    assert (pin, "") in meta.handed
    engine.update(scheduled)
    for _ in range(20):
        step(engine, watch, unpinned=watch.quiet(sorted(watch.over)))
    assert not watch.given_twice
    assert engine.held == 0
    assert not engine.scheduler.requests
    assert not engine.half._pins


@asks
def test_a_prompt_of_which_vllm_kept_less_than_was_told_is_taken_back_at_once(start):
    """With the next step, which also names the request: workers would report it sent otherwise."""
    engine, watch = start(role="kv_producer")
    request = engine.add(40, PREFILL)
    watch.read(engine.schedule()[1])
    (pin,) = watch.told
    request.status = RequestStatus.FINISHED_LENGTH_CAPPED
    assert engine.half.finished(request, ([],))[0] is False
    assert StepMeta(*engine.half.build_meta(SchedulerOutput.make_empty())).handed == ((pin, ""),)


def test_a_prompt_of_which_a_rank_let_go_early_is_not_reported_sent(start):
    """A defect on one rank ends a prompt there before vLLM has finished the request."""
    engine, watch = start(role="kv_producer", tensor=2)
    engine.add(150, PREFILL)
    step(engine, watch)
    (pin,) = watch.told
    step(engine, watch, unpinned=((pin, 0),))
    step(engine, watch)
    output, meta = engine.schedule()
    assert not meta.handed
    engine.update(output, unpinned=((pin, 1),))
    assert engine.held == 0


@pytest.mark.parametrize("policy", [SchedulingPolicy.FCFS, SchedulingPolicy.PRIORITY])
def test_preemption_leaves_blocks_in_flight_alone(start, policy):
    engine, watch = start(14, tokens=96, role="kv_producer")
    engine.scheduler.policy = policy
    requests = [engine.add([n] * 150, {**PREFILL, "transfer_id": str(n)}) for n in (5, 6)]
    requests[0].priority = 9
    preempted = set()
    for _ in range(12):
        preempted |= set(step(engine, watch).preempted_req_ids or ())
    assert preempted
    assert watch.told
    assert not watch.given_twice
    for _ in range(20):
        step(engine, watch, unpinned=watch.quiet(sorted(watch.over)))
    assert all(request.is_finished() for request in requests)
    assert engine.held == 0


def test_a_reset_that_preempts_leaves_blocks_in_flight_alone(start):
    engine, watch = start(20)
    request = engine.add([5] * 200, PREFILL)
    step(engine, watch)
    step(engine, watch)
    first = set().union(*watch.told.values())
    assert len(first) == 8
    preempt_all(engine)
    engine.add([6] * 300)
    for _ in range(8):
        step(engine, watch)
    assert not watch.given_twice
    for _ in range(20):
        step(engine, watch, unpinned=watch.quiet(sorted(watch.over)))
    assert request.is_finished()
    assert engine.held == 0


def reset_while_a_load_waits(start):
    """A loaded request is given blocks without a question."""
    engine, watch = start(14, role="kv_both")
    decode = engine.add([6] * 64, DECODE)
    engine.add([5] * 200, {**PREFILL, "transfer_id": "p"})
    step(engine, watch)
    told = {"received": (decode.request_id,)}
    step(engine, watch, unpinned=watch.quiet([watch.loading[decode.request_id]]), **told)
    assert decode.num_output_tokens == 0
    engine.scheduler.num_lookahead_tokens = 80  # drafts need more blocks than it was loaded into
    preempt_all(engine)
    for _ in range(20):
        step(engine, watch)
    return watch


def test_a_reset_while_a_load_waits_with_blocks(start):
    assert not reset_while_a_load_waits(start).given_twice


@asks
def test_such_a_reset_is_dangerous(start, monkeypatch):
    monkeypatch.setattr(Custody, "admitted", nothing)
    assert reset_while_a_load_waits(start).given_twice


def test_an_abort_right_after_a_reset(start):
    engine, watch = start(20)
    request = engine.add([5] * 200, PREFILL)
    step(engine, watch)
    preempt_all(engine)
    engine.abort(request)
    engine.add([6] * 300)
    for _ in range(10):
        step(engine, watch)
    assert watch.told
    assert not watch.given_twice
    step(engine, watch, unpinned=watch.quiet(sorted(watch.over)))


# ---------------------------------------------------------------------- a campaign


class Campaign:
    """Requests of all kinds, preemptions, resets and aborts over a small pool, at random."""

    def __init__(self, seed, start, role):
        self.random = random.Random(seed)
        self.engine, self.watch = start(self.random.randint(14, 40), role=role)
        self.engine.scheduler.policy = self.random.choice(list(SchedulingPolicy))
        # Drafts need blocks that a load has not brought.
        self.engine.scheduler.num_lookahead_tokens = self.random.choice([0, 40])
        self.role, self.alive = role, []

    def run(self, steps=60):
        for _ in range(steps):
            self.arrive()
            roll = self.random.random()
            if roll < 0.08:
                preempt_all(self.engine)
            if roll < 0.12 and self.alive:
                self.engine.abort(self.alive.pop(self.random.randrange(len(self.alive))))
            self.step(self.random.random() < 0.5)
        for request in self.alive:
            self.engine.abort(request)
        for _ in range(20):
            self.step(True)
        return self

    def arrive(self):
        if self.random.random() < 0.4:
            params = [None, {**PREFILL, "transfer_id": str(self.random.random())}]
            if self.role == "kv_both":
                params.append({**DECODE, "transfer_id": str(self.random.random())})
            prompt = [self.random.randrange(500)] * self.random.randint(2, 190)
            request = self.engine.add(
                prompt, self.random.choice(params), output=self.random.choice([1, 1, 30])
            )
            request.priority = self.random.randrange(3)
            self.alive.append(request)

    def step(self, drain):
        scheduler = self.engine.scheduler
        output, meta = self.engine.schedule()
        self.watch.read(meta)
        received = []
        if drain:
            for name in list(self.watch.loading):
                pin = self.watch.loading[name]
                request = scheduler.requests.get(name)
                if request is not None:
                    received.append(name)
                self.watch.over.add(pin)
                del self.watch.loading[name]
        pins = [pin for pin in self.watch.over if drain or self.random.random() < 0.1]
        told = {"received": tuple(received), "unpinned": self.watch.quiet(sorted(pins))}
        self.engine.update(output, **told)
        self.alive = [request for request in self.alive if not request.is_finished()]


ROLES = ("kv_producer", "kv_both")


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("seed", range(10))
def test_nothing_under_transfer_is_handed_out_and_everything_comes_back(start, seed, role):
    campaign = Campaign(seed, start, role).run()
    assert not campaign.watch.given_twice
    assert campaign.engine.held == 0
    assert not campaign.engine.scheduler.requests
    assert not campaign.engine.half._pins


MUTANTS = {
    "preemption is not expected": (Prefills, "before_preemption", nothing),
    "resets are not noticed": (Prefills, "before_allocation", nothing),
    "promises are not kept": (Pins, "hold", nothing),
}


@asks
@pytest.mark.parametrize("name", MUTANTS)
def test_the_watch_sees_a_guard_that_is_missing(start, monkeypatch, name):
    monkeypatch.setattr(*MUTANTS[name])
    for seed in range(40):
        campaign = Campaign(seed, start, ROLES[seed % 2])
        try:
            campaign.run()
        except (AssertionError, KeyError, ValueError):
            return
        if campaign.watch.given_twice:
            return
    raise AssertionError("nobody noticed")


# ---------------------------------------------------------------------- whom to trust


def config(scheduler_cls=None):
    return SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=scheduler_cls))


def groups(*names):
    specs = [type(name, (), {})() for name in names]
    return SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec) for spec in specs])


@asks
def test_only_tables_that_grow_and_vllms_own_scheduler_are_trusted(monkeypatch):
    full = "FullAttentionSpec"
    assert Custody(config(), groups(full, "MLAAttentionSpec"))
    assert not Custody(config(), groups(full, "SlidingWindowSpec"))
    assert not Custody(config(), groups("RSWASpec"))
    assert not Custody(config("their.Scheduler"), groups(full))
    monkeypatch.setattr(custody, "ASKS_BEFORE_PREEMPTING", False)
    assert not Custody(config(), groups(full))


@asks
def test_nobody_is_trusted_while_a_request_waits_with_blocks():
    found = Custody(config(), groups("FullAttentionSpec"))
    loading, session = SimpleNamespace(request_id="a"), SimpleNamespace(request_id="b")
    found.admitted(loading)
    found.scheduled(SimpleNamespace(num_scheduled_tokens={}))
    assert not found
    found.scheduled(SimpleNamespace(num_scheduled_tokens={"a": 1}))
    assert found
    found.session(session)
    assert not found
    found.finished(session)
    assert found
