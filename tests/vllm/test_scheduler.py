"""The scheduler half inside vLLM's own scheduler; the test plays the workers."""

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from neuron_push.commands import Abandon, Compute, Near, Offer, Receive, Retire, Settle, unpack_ids
from neuron_push.protocol import Address
from neuron_push.vllm import compat
from neuron_push.vllm.decodes import DECLINE_PATIENCE
from tests.vllm.kit import BLOCK, DECODE, PREFILL, Engine, of_kind, preempt_all


@pytest.fixture
def start():
    engines = []

    def make(*args, **options):
        engines.append(Engine(*args, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def receive_of(engine, request):
    """Schedule the step that admits a decode leg; its registration."""
    (found,) = of_kind(engine.step(), Receive)
    assert found.request == request.request_id
    return found


def unpin(*pins, ranks=1):
    return tuple((pin, rank) for pin in pins for rank in range(ranks))


# ---------------------------------------------------------------------- prefill legs


def test_a_chunked_prefill_settles_chunk_by_chunk(start):
    engine = start(tokens=64)
    request = engine.add(100, PREFILL)
    first, second, third = engine.step(), engine.step(), engine.step()
    (offer,) = of_kind(first, Offer)
    assert offer.request == request.request_id
    assert offer.match.tokens == 100
    (one,) = of_kind(first, Settle)
    assert (one.source, one.stop, one.first, one.last) == (offer.source, 64, (0,), False)
    assert not of_kind(first, Near)
    # Where vLLM asks before it preempts, the end of a prefill leg is told with its last tokens.
    ends = (second, third) if compat.ASKS_BEFORE_PREEMPTING else (third, second)
    assert [type(command) for command in second.commands[:2]] == [Near, Settle]
    (two,) = of_kind(second, Settle)
    assert (two.source, two.stop, two.first, two.last) == (offer.source, 100, (4,), True)
    assert two.pin == one.pin
    assert len(one.blocks[0]) == 4
    assert len(two.blocks[0]) == 3
    assert len({*one.blocks[0], *two.blocks[0]}) == 7
    (gone,) = of_kind(ends[0], Retire)
    assert not of_kind(ends[1], Retire)
    assert (gone.source, gone.outcome) == (offer.source, "finished")
    engine.step(unpinned=unpin(one.pin))
    assert engine.held == 0


def test_the_answer_of_a_prefill_leg_says_where_the_prompt_is(start):
    engine = start()
    request = engine.add(40, PREFILL)
    engine.step()
    params = engine.last_output(request).kv_transfer_params
    assert params["do_remote_prefill"] is True
    assert params["remote_engine_id"] == engine.config.kv_transfer_config.engine_id
    assert params["remote_request_id"] == request.request_id
    assert 0 < params["remote_port"] < 65_536
    assert params["transfer_id"] == "t1"


@pytest.mark.parametrize("mode", ["auto", "pull", "push"])
def test_the_answer_of_a_prefill_leg_names_its_blocks_unless_they_are_pushed(start, mode):
    engine = start(extra={"mode": mode})
    request = engine.add(40, PREFILL)
    (settle,) = of_kind(engine.step(), Settle)
    params = engine.last_output(request).kv_transfer_params
    pulled = mode != "push"
    assert params["remote_block_ids"] == ([settle.blocks[0]] if pulled else None)
    assert params["transfer_mode"] == ("pull" if pulled else "push")
    assert engine.half._describe().modes == (("push", "pull") if mode == "auto" else (mode,))


def test_a_prefill_leg_of_a_pushing_router_is_not_weighed_down_with_block_ids(start):
    engine = start()
    request = engine.add(40, {**PREFILL, "transfer_mode": "push"})
    engine.step()
    assert engine.last_output(request).kv_transfer_params["remote_block_ids"] is None


def test_a_decode_leg_with_block_ids_reads_and_one_without_is_pushed_to(start):
    engine = start()
    plain = engine.add(40, DECODE)
    assert not receive_of(engine, plain).pull
    late = engine.add(40, {**DECODE, "transfer_id": "t2", "remote_block_ids": [[5, 6, 7]]})
    assert receive_of(engine, late).pull


def test_blocks_of_a_finished_prompt_are_held_until_every_rank_lets_go(start):
    engine = start(tensor=4)
    engine.add(40, PREFILL)
    (settle,) = of_kind(engine.step(), Settle)
    engine.step()
    assert engine.held == 3
    assert engine.connector.has_pending_push_work()
    for rank in (0, 2, 2, 0, 3):
        engine.step(unpinned=((settle.pin, rank),))
        assert engine.held == 3
    engine.step(unpinned=((settle.pin, 1),))
    assert engine.held == 0
    assert not engine.connector.has_pending_push_work()


def test_with_layers_a_step_is_told_before_it_computes_and_settled_without_blocks(start):
    engine = start(tokens=64, extra={"streaming": "layer"})
    engine.add(100, PREFILL)
    metas = [engine.step(), engine.step()]
    (one,), (two,) = (of_kind(meta, Compute) for meta in metas)
    (done,), (last,) = (of_kind(meta, Settle) for meta in metas)
    assert [meta.layers for meta in metas] == [one.step, two.step] and one.step < two.step
    assert (one.stop, two.stop) == (done.stop, last.stop) == (64, 100)
    assert (one.first, two.first, done.first, last.first) == ((0,), (4,), (4,), (7,))
    assert [len(unpack_ids(*command.blocks)) for command in (one, two)] == [4, 3]
    assert done.blocks == last.blocks == ([],)
    assert one.pin == two.pin == done.pin == last.pin


def test_without_streaming_everything_is_settled_at_the_end(start):
    engine = start(tokens=64, extra={"streaming": "off"})
    engine.add(100, PREFILL)
    assert not of_kind(engine.step(), Settle)
    (settle,) = of_kind(engine.step(), Settle)
    assert (settle.stop, settle.first, settle.last) == (100, (0,), True)
    assert len(settle.blocks[0]) == 7


def test_a_prefix_hit_is_settled_with_the_first_step_of_the_request(start):
    engine = start(tokens=256)
    engine.add(100, PREFILL)
    engine.step()
    engine.add(100, {**PREFILL, "transfer_id": "t2"})
    meta = engine.step()
    (settle,) = of_kind(meta, Settle)
    assert (settle.stop, settle.first, settle.last) == (100, (0,), True)
    assert len(settle.blocks[0]) == 7
    assert engine.held == 7 + 1  # six blocks are shared


def test_a_prompt_of_other_lengths(start):
    engine = start(tokens=256)
    for tokens, blocks in ((1, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2)):
        engine.add([tokens + 9] * tokens, PREFILL)
        (settle,) = of_kind(engine.step(), Settle)
        assert settle.last
        assert settle.stop == tokens
        assert len(settle.blocks[0]) == blocks


def test_an_abort_of_a_prefill_says_so(start):
    engine = start(tokens=64)
    waiting, running = engine.add(30, PREFILL), engine.add([9] * 200, PREFILL)
    engine.abort(waiting)
    first = engine.step()
    (gone,) = of_kind(first, Retire)
    assert gone.outcome == "ended"
    assert "abort" in gone.reason
    (settle,) = of_kind(first, Settle)
    engine.abort(running)
    (gone,) = of_kind(engine.step(), Retire)
    assert (gone.source, gone.outcome) == (settle.source, "ended")
    assert engine.held == len(settle.blocks[0])
    engine.step(unpinned=unpin(settle.pin))
    assert engine.held == 0


def two_that_do_not_fit(start):
    """Two prefill legs that together outgrow the pool after both were admitted."""
    engine = start(13, tokens=64, extra={"streaming": "chunk"})
    engine.scheduler.scheduler_reserve_full_isl = False
    first = engine.add([5] * 100, PREFILL)
    second = engine.add([6] * 100, {**PREFILL, "transfer_id": "t2"})
    return engine, first, second


def test_preemption_withdraws_and_offers_again(start):
    engine, first, second = two_that_do_not_fit(start)
    told, pins = [], []
    for _ in range(12):
        output, meta = engine.schedule()
        told.append((set(output.preempted_req_ids or ()), meta))
        done = [c.source for c in of_kind(meta, Retire)]
        pins += list(of_kind(meta, Settle))
        quiet = {c.pin for _, m in told for c in of_kind(m, Settle) if c.source in done}
        engine.update(output, unpinned=unpin(*quiet))
    preempted = [(names, meta) for names, meta in told if names]
    assert preempted
    for names, meta in preempted:
        assert [c.outcome for c in of_kind(meta, Retire)].count("preempted") == len(names)
        assert {c.request for c in of_kind(meta, Offer)} >= names
    for request in (first, second):
        assert engine.last_output(request).kv_transfer_params["do_remote_prefill"]
    ended = [c for _, meta in told for c in of_kind(meta, Retire) if c.outcome == "finished"]
    assert len(ended) == 2
    for retire in ended:
        settles = [c for c in pins if c.source == retire.source]
        assert [i for c in settles for i in range(c.first[0], c.first[0] + len(c.blocks[0]))] == [
            *range(7)
        ]
        assert settles[-1].last
    assert engine.held == 0


def test_a_running_request_never_waits_for_its_own_pins(start):
    """Pins of prompts under way do not count as blocks about to come back."""
    engine = start()
    engine.add([5] * 200, PREFILL)
    engine.step()
    assert engine.held
    assert not engine.connector.has_pending_block_frees()


@pytest.mark.skipif(not compat.FAILS_BY_REQUEST, reason="0.29 does not ask")
def test_one_preemption_at_a_time_while_pins_drain(start):
    engine = start(20, tokens=96)
    engine.scheduler.scheduler_reserve_full_isl = False
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32
    requests = [engine.add([n] * 130, {**PREFILL, "transfer_id": str(n)}) for n in (5, 6, 7)]
    most = 0
    for _ in range(12):
        output, _ = engine.schedule()
        most = max(most, len(output.preempted_req_ids or ()))
        engine.update(output)
    assert most == 1
    assert sum(r.status == RequestStatus.PREEMPTED for r in requests) >= 1


def test_preempted_and_resumed_in_one_step(start):
    engine = start(tokens=64)
    engine.add(200, PREFILL)
    (before,) = of_kind(engine.step(), Settle)
    preempt_all(engine)
    meta = engine.step()
    kinds = [type(command) for command in meta.commands]
    assert kinds == [Offer, Retire, Settle]
    offer, gone, settle = of_kind(meta, Offer | Retire | Settle)
    assert (gone.source, gone.outcome) == (before.source, "preempted")
    assert settle.source == offer.source != before.source
    assert settle.pin != before.pin
    assert settle.first == (0,)
    if compat.ASKS_BEFORE_PREEMPTING:
        # Nothing of ours was in the way of the reset; what is in flight is not overwritten.
        assert settle.stop == 64
        assert not set(settle.blocks[0]) & set(before.blocks[0])
    else:
        # What the first chunk computed is found in the prefix cache, and told again as a whole.
        assert settle.stop == 128
        assert settle.blocks[0][:4] == before.blocks[0]


def test_the_v2_runner_hears_of_resumed_requests_as_new(start):
    engine = start(tokens=64)
    engine.scheduler.use_v2_model_runner = True
    engine.add(200, PREFILL)
    engine.step()
    preempt_all(engine)
    output, meta = engine.schedule()
    assert [new.req_id for new in output.scheduled_new_reqs]
    (settle,) = of_kind(meta, Settle)
    stop = 64 if compat.ASKS_BEFORE_PREEMPTING else 128
    assert (settle.first, settle.stop, len(settle.blocks[0])) == ((0,), stop, stop // BLOCK)


# ---------------------------------------------------------------------- decode legs


@pytest.mark.parametrize(
    ("tokens", "blocks"), [(2, 1), (BLOCK - 1, 1), (BLOCK, 1), (BLOCK + 1, 2), (100, 7)]
)
def test_a_decode_leg_registers_its_whole_prompt(start, tokens, blocks):
    engine = start()
    request = engine.add(tokens, {**DECODE, "deadline_ms": 2500})
    found = receive_of(engine, request)
    assert (found.start, found.stop, found.first) == (0, tokens, (0,))
    assert len(found.blocks[0]) == blocks == engine.held
    assert 0 not in found.blocks[0]
    assert found.prefill == Address("127.0.0.1", 5600)
    assert (found.engine, found.patience) == ("p", 2.5)
    assert not engine.step().commands
    engine.step(received=(request.request_id,), unpinned=unpin(found.pin))
    output, meta = engine.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 1}
    assert not meta.commands
    engine.update(output)
    assert engine.last_output(request).new_token_ids == [7]
    engine.step()
    assert engine.held == 0


def test_a_partial_hit_registers_the_rest(start):
    engine = start(tokens=256)
    engine.add(50)
    engine.step()
    request = engine.add(100, DECODE)
    found = receive_of(engine, request)
    assert (found.start, found.stop, found.first) == (48, 100, (3,))
    assert len(found.blocks[0]) == 4


def test_a_full_hit_declines(start):
    """Only the last token is missing, and decoding computes it in any case."""
    engine = start(tokens=256)
    engine.add(6 * BLOCK + 1)
    engine.step()
    request = engine.add(6 * BLOCK + 1, DECODE)
    output, meta = engine.schedule()
    (none,) = of_kind(meta, Receive)
    assert (none.start, none.stop, none.blocks, none.pin) == (0, 0, ([],), -1)
    assert none.patience == DECLINE_PATIENCE
    assert output.num_scheduled_tokens == {request.request_id: 1}
    engine.update(output)
    assert not engine.step().commands


def test_a_prompt_of_one_token_declines(start):
    engine = start()
    engine.add([9], DECODE)
    (none,) = of_kind(engine.step(), Receive)
    assert none.start == none.stop


def test_a_request_that_may_not_read_caches_declines(start):
    engine = start(tokens=256)
    request = engine.add(40, DECODE, skip_reading_prefix_cache=True)
    output, meta = engine.schedule()
    (found,) = of_kind(meta, Receive)
    if found.start == found.stop:
        assert output.num_scheduled_tokens == {request.request_id: 40}
    else:
        assert not compat.FAILS_BY_REQUEST  # 0.29 loads such requests


def test_an_abort_before_admission_declines(start):
    engine = start()
    request = engine.add(40, DECODE)
    engine.abort(request)
    meta = engine.step()
    (none,) = of_kind(meta, Receive)
    assert none.start == none.stop
    assert not engine.half._decodes.waiting


@pytest.mark.parametrize("drained_first", [True, False])
def test_an_abort_while_loading_holds_the_blocks_until_all_ranks_drained(start, drained_first):
    engine = start(tensor=2)
    request = engine.add(40, DECODE)
    found = receive_of(engine, request)
    engine.abort(request)
    assert of_kind(engine.step(), Abandon)[0].attempt == found.attempt
    ended = {"received": (), "failed": (request.request_id,)}
    if drained_first:
        engine.step(unpinned=unpin(found.pin, ranks=2))
        assert engine.held == 3
        engine.step(**ended)
    else:
        engine.step(**ended)
        assert engine.held == 3
        engine.step(unpinned=((found.pin, 1),))
        assert engine.held == 3
        assert engine.connector.has_pending_push_work()
        engine.step(unpinned=((found.pin, 0),))
    assert engine.held == 0
    assert not engine.connector.has_pending_push_work()


def test_a_failed_load_fails_the_request_and_holds_its_blocks(start):
    engine = start(policy="fail")
    request = engine.add(40, DECODE)
    found = receive_of(engine, request)
    assert found.hold_failure != compat.FAILS_BY_REQUEST
    engine.step(failed=(request.request_id,), bad_blocks=found.blocks[0])
    assert engine.last_output(request).finish_reason == FinishReason.ERROR
    assert engine.held == 3
    engine.step(unpinned=unpin(found.pin))
    assert engine.held == 0
    assert engine.step().commands == ()


def test_a_failed_load_is_recomputed_and_never_loaded_again(start):
    engine = start(policy="recompute", tokens=256)
    request = engine.add(40, DECODE)
    found = receive_of(engine, request)
    assert found.hold_failure
    engine.step(failed=(request.request_id,), bad_blocks=found.blocks[0], unpinned=unpin(found.pin))
    output, meta = engine.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 40}
    assert not meta.commands
    engine.update(output)
    assert engine.last_output(request).new_token_ids == [7]


def test_a_preempted_decode_is_not_loaded_twice(start):
    engine = start(tokens=256)
    request = engine.add(40, DECODE, output=5)
    found = receive_of(engine, request)
    engine.step(received=(request.request_id,), unpinned=unpin(found.pin))
    engine.step()
    preempt_all(engine)
    output, meta = engine.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 41}
    assert not meta.commands


def test_more_loads_than_blocks_wait_and_do_not_fail(start):
    engine = start(11, tokens=256)
    requests = [engine.add([n] * 60, {**DECODE, "transfer_id": str(n)}) for n in (5, 6, 7)]
    meta = engine.step()
    found = of_kind(meta, Receive)
    assert [r.request for r in found] == [r.request_id for r in requests[:2]]
    assert not meta.rejected
    assert not engine.step().commands
    engine.step(received=(requests[0].request_id,), unpinned=unpin(found[0].pin))
    (third,) = [c for _ in range(4) for c in of_kind(engine.step(), Receive)]
    assert third.request == requests[2].request_id


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize(
    ("role", "params", "says"),
    [
        ("kv_consumer", {**DECODE, "remote_port": "x"}, "remote_port"),
        ("kv_consumer", {"do_remote_prefill": True}, "remote_host is missing"),
        ("kv_producer", DECODE, "prefill engine"),
        ("kv_consumer", PREFILL, "decode engine"),
    ],
)
def test_bad_params_fail_that_request_only(start, role, params, says, policy):
    engine = start(role=role, policy=policy, tokens=256)
    bad, good = engine.add(40, params), engine.add([9] * 20)
    meta = engine.step()
    ((name, reason, blocks),) = meta.rejected
    assert name == bad.request_id
    assert says in reason
    assert not meta.commands
    assert engine.last_output(good).new_token_ids == [7]
    assert len(blocks) == 3
    engine.step(failed=(name,), bad_blocks=blocks)
    if policy == "fail":
        assert engine.last_output(bad).finish_reason == FinishReason.ERROR
    else:
        engine.step()
        assert engine.last_output(bad).new_token_ids == [7]
    meta = engine.step()
    assert not meta.rejected
    assert not meta.commands
    assert engine.held == 0


def test_an_abort_of_a_refused_request(start):
    engine = start()
    bad = engine.add(40, {"do_remote_prefill": True})
    meta = engine.step()
    engine.abort(bad)
    engine.step(failed=(bad.request_id,), bad_blocks=meta.rejected[0][2])
    assert engine.held == 0


def test_a_prompt_longer_than_the_cache_waits_and_pins_nothing(start):
    engine = start(8, tokens=64)
    for params in (DECODE, PREFILL):
        request = engine.add([9] * 400, params)
        for _ in range(3):
            assert not of_kind(engine.step(), Receive)
        held = engine.held
        engine.abort(request)
        engine.step()
        pins = unpin(*engine.half._pins._pins)
        engine.step(unpinned=pins)
        assert engine.held == 0, held


# ---------------------------------------------------------------------- between steps


def test_a_step_in_which_nothing_happens_says_nothing(start):
    engine = start(tokens=256)
    engine.add(40, output=3)
    for _ in range(3):
        meta = engine.step()
        assert (meta.commands, meta.rejected, meta.idle) == ((), (), False)
    assert engine.connector.has_pending_push_work() is False


def test_idle_is_said_only_while_something_is_held_and_nothing_is_computed(start):
    engine = start(tokens=256)
    assert not engine.step().idle
    request = engine.add(40, DECODE)
    assert engine.step().idle
    assert engine.step().idle
    engine.add([9] * 20)
    assert not engine.step().idle
    engine.step(received=(request.request_id,))
    assert not engine.step().idle


def test_a_load_that_ends_quiet_takes_no_references_and_one_that_does_not_does(start):
    engine = start(tensor=2)
    request = engine.add(40, DECODE)
    found = receive_of(engine, request)
    blocks = [engine.pool.blocks[block] for block in found.blocks[0]]
    assert [block.ref_cnt for block in blocks] == [1, 1, 1]
    engine.step(unpinned=((found.pin, 0),))
    engine.step(received=(request.request_id,))
    assert [block.ref_cnt for block in blocks] == [2, 2, 2]
    engine.step(unpinned=((found.pin, 1),))
    assert {block.ref_cnt for block in blocks} <= {0, 1}


def test_the_gauges_follow_the_pins(start):
    engine = start()
    assert engine.connector.get_kv_connector_stats() is None
    request = engine.add(40, DECODE)
    found = receive_of(engine, request)
    assert engine.half.pinned()[0] == 3
    engine.step(received=(request.request_id,), unpinned=unpin(found.pin))
    assert engine.half.pinned() == (0, 0.0)


def test_what_the_side_channel_tells(start):
    engine = start(role="kv_consumer", tensor=2)
    info = engine.half._describe()
    assert (info.role, info.world, info.tensor_parallel) == ("consumer", 2, 2)
    assert info.free_blocks == engine.free_at_start
    assert info.block_tokens == BLOCK
