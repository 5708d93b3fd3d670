"""The emulated device: order, time, fences, tokens."""

import numpy as np
import pytest

from neuron_push.emulation import cost, pattern
from tests.emulation import kit

PROMPT = kit.prompt(90)
BLOCKS = list(range(1, 12))


@pytest.mark.parametrize("chunk", [7, 16, 64, 1000])
@pytest.mark.parametrize("device", ["p5en", "trn2", "cpu"])
def test_chunks_make_no_difference(device, chunk):
    engine = kit.Engine(device)
    answer = engine.generate(PROMPT, BLOCKS, 5, chunk=chunk)
    assert answer == pattern.continuation(PROMPT, 5)
    assert engine.seen.wrong_rows == 0


def test_two_batches_in_flight_draw_the_second_token_from_the_first():
    engine = kit.Engine()
    engine.launch(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": len(PROMPT)})
    engine.launch(cached=[("r", None, len(PROMPT))], scheduled={"r": 1})
    answers = engine.work()[0] + engine.work()[0]
    assert answers == pattern.continuation(PROMPT, 2)


def test_a_fence_is_done_when_its_step_is_written_and_not_before():
    engine = kit.Engine()
    first = engine.launch(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": 50})
    second = engine.launch(cached=[("r", None, 50)], scheduled={"r": 40})
    assert not first.done() and not first.wait(0)
    engine.work()
    assert first.done() and first.wait(0) and not second.done()
    engine.work()
    assert second.done()


def test_layers_are_written_one_after_the_other_and_each_has_its_fence():
    engine = kit.Engine(layers_apart=True, profile="qwen3-32b-tp8-p5en")
    end = engine.launch(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": 90})
    step, fences, seen = engine.launched[0], [], []
    for step.layer in range(kit.LAYERS):
        fences.append(engine.writer.fence())
    step.layer = None
    fill = engine.writer._oracle.fill_layers

    def look(slots, start, stop):
        seen.append(([fence.done() for fence in fences], end.done(), engine.clock.now()))
        fill(slots, start, stop)

    engine.writer._oracle.fill_layers = look
    engine.work()
    assert [done for done, _, _ in seen] == [
        [False, False, False], [True, False, False], [True, True, False]
    ]  # fmt: skip
    assert not any(ended for _, ended, _ in seen) and end.done() and all(f.done() for f in fences)
    times = [at for _, _, at in seen]
    assert times == sorted(times) and times[0] == pytest.approx(90 * 25e-6 / 3, rel=1e-6)
    assert engine.seen.wrong_rows == 0


def test_a_fence_before_any_launch_is_done():
    assert kit.Engine().writer.fence().done()


def test_steps_take_their_modelled_time_one_after_the_other():
    engine = kit.Engine(profile="qwen3-32b-tp8-p5en")
    engine.launch(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": 90})
    engine.launch(cached=[("r", None, 90)], scheduled={"r": 1})
    engine.work()
    assert engine.clock.now() == pytest.approx(90 * 25e-6, rel=1e-9)
    engine.work()
    assert engine.clock.now() == pytest.approx(90 * 25e-6 + 5.6e-3, rel=1e-9)


def test_writes_are_counted_by_whether_the_next_step_was_launched():
    engine = kit.Engine()
    engine.launch(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": 90})
    engine.writer.wrote()
    engine.work()
    engine.writer.wrote()
    engine.writer.wrote()
    engine.launch(cached=[("r", None, 90)], scheduled={"r": 1})
    engine.writer.wrote()
    assert (engine.seen.writes_early, engine.seen.writes_late) == (2, 2)


def test_the_first_step_over_kv_from_elsewhere_costs_a_decode_step():
    engine = kit.Engine(profile="qwen3-32b-tp8-p5en")
    engine.step(new=[("r", PROMPT, BLOCKS, len(PROMPT) - 1)], scheduled={"r": 1})
    assert engine.seen.modelled_seconds == pytest.approx(5.6e-3)
    engine.step(cached=[("r", None, len(PROMPT))], scheduled={"r": 1})
    assert engine.seen.modelled_seconds == pytest.approx(2 * 5.6e-3)


def test_the_thread_works_launches_off_and_ends():
    engine = kit.Engine()
    engine.writer.start()
    step = engine.writer.launch(
        engine.requests.update(kit.output(new=[("r", PROMPT, BLOCKS, 0)], scheduled={"r": 90}))
    )
    assert step.done.wait(10) and step.sampled == [pattern.continuation(PROMPT, 1)]
    engine.writer.close()
    assert not engine.writer._thread.is_alive()


def test_ranks_that_hold_one_head_each_agree_after_the_sum():
    ranks = [kit.Engine(heads=[head]) for head in range(kit.HEADS)]
    answers = [rank.generate(PROMPT, BLOCKS, 3) for rank in ranks]
    assert answers[0] == answers[1] == pattern.continuation(PROMPT, 3)


def test_costs_are_sums_of_exact_durations():
    profile = cost.Profile("here", per_prefill_token=1e-7, per_decode_step=3e-4, base=1e-5)
    assert profile.step(3, 0) == pytest.approx(1e-5 + 3e-7, rel=1e-12)
    assert profile.step(0, 5) == pytest.approx(1e-5 + 3e-4, rel=1e-12)
    assert profile.transfer(1 << 30) == 0.0
    linked = cost.Profile("here", link=cost.Link(bandwidth=1e9, latency=2e-6))
    assert linked.transfer(750) == pytest.approx(2.75e-6, rel=1e-12)


def test_profiles_name_their_source():
    for name, profile in cost.PROFILES.items():
        assert profile.source, name
    with pytest.raises(cost.ConfigError, match="known: instant"):
        cost.profile("nothing")


def test_one_seed_decides_everything():
    first, second = (kit.Engine() for _ in range(2))
    for engine in (first, second):
        engine.generate(PROMPT, BLOCKS, 4, chunk=20)
    assert first.seen.bytes_checked == second.seen.bytes_checked
    for mine, theirs in zip(first.cache.views[0], second.cache.views[0], strict=True):
        assert np.array_equal(mine.tensor.numpy(), theirs.tensor.numpy())
