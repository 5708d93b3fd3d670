import json

from neuron_push.emulation.report import Reporter, timed, unfit
from tests.emulation import kit


def test_the_summary_is_there_from_the_start_and_whole_at_the_end(tmp_path):
    reporter = Reporter(str(tmp_path), "engine-0")
    assert json.loads((tmp_path / "engine-0.json").read_text())["steps"] == 0
    reporter.summary.steps = 3
    reporter.close()
    assert json.loads((tmp_path / "engine-0.json").read_text())["steps"] == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_what_idle_engines_have_seen_is_written(tmp_path):
    reporter = Reporter(str(tmp_path), "engine-0")
    reporter.summary.steps = 1
    reporter.step_done()
    reporter.idle()
    assert json.loads((tmp_path / "engine-0.json").read_text())["steps"] == 1


def test_the_work_of_emulation_is_measured():
    engine = kit.Engine(profile="quick")
    engine.generate(kit.prompt(50), [1, 2, 3, 4], 2)
    seen = engine.seen
    assert seen.modelled_seconds > 0 and seen.bytes_checked > 0
    assert (seen.prefill_tokens, seen.decode_tokens) == (50, 1)


def test_a_benchmark_is_refused_when_emulation_costs_too_much():
    summary = {"name": "d-0", "own_seconds": 0.19, "late_seconds": 0.2, "modelled_seconds": 1.0}
    assert unfit(summary) == ""
    assert "more than 20%" in unfit({**summary, "own_seconds": 0.21})
    assert "0.210 s late" in unfit({**summary, "late_seconds": 0.21})
    nothing = {"own_seconds": 0.0, "late_seconds": 0.0, "modelled_seconds": 0.0}
    assert unfit({**summary, **nothing}) == ""


def test_timed_engines_must_model_time_and_all_be_fit():
    good = {"name": "p-0", "own_seconds": 0.1, "late_seconds": 0.0, "modelled_seconds": 1.0}
    assert timed([good, good]) == []
    bad = {**good, "name": "d-0", "own_seconds": 0.5}
    none = {**good, "name": "d-1", "own_seconds": 0.0, "modelled_seconds": 0.0}
    found = timed([good, bad, none])
    assert len(found) == 2 and "d-0 spent" in found[0] and "d-1 modelled no time" in found[1]
