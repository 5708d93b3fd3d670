"""The matrix: its file, its states, its reports."""

import dataclasses
import json
import signal
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ci.matrix import cells, checks, command, hardware, load, pool, report, states
from ci.matrix.states import Outcome, State
from neuron_push.emulation.devices import DEVICES
from neuron_push.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
MATRIX = cells.read(ROOT / "ci" / "matrix.yaml")
PR = cells.cells(MATRIX, "pr")


def cell(**changes):
    text = {"prefill": "trn2", "decode": "p5en", **changes}
    sides = [cells.Side.parse(text[name], "0.32.0") for name in ("prefill", "decode")]
    return cells.Cell(*sides, "tiny-gqa", "neuron-push", "push", True, "gpu-v2", ("shapes",), 24000)


def test_there_are_no_other_states():
    assert {str(state) for state in State} == {
        "passed-hardware", "passed-emulated", "not-run", "failed", "refused",
    }  # fmt: skip


def test_an_emulated_pass_is_never_a_hardware_pass():
    verdict = checks.Verdict([], "", {})
    assert command.judge(cell(), verdict, False).state is State.PASSED_EMULATED
    assert command.judge(cell(), verdict, True).state is State.PASSED_HARDWARE
    assert states.passed(False) is State.PASSED_EMULATED


def test_a_refusal_counts_only_where_the_file_says_so_and_nothing_else_does_there():
    refusal = checks.Verdict([], "refused: parts of a state", {})
    assert command.judge(cell(), refusal, False).state is State.FAILED
    listed = dataclasses.replace(cell(), refused="parts of a state")
    assert command.judge(listed, refusal, False).state is State.REFUSED
    assert command.judge(listed, checks.Verdict([], "", {}), False).state is State.FAILED
    other = checks.Verdict([], "refused: another model", {})
    assert command.judge(listed, other, False).state is State.FAILED


def test_a_problem_is_a_failure():
    verdict = checks.Verdict(["one answer differs"], "", {})
    assert command.judge(cell(), verdict, False).state is State.FAILED


def test_the_pr_tier_has_what_every_change_must_pass():
    pairs = {(c.prefill.device, c.decode.device) for c in PR}
    assert pairs >= {(p, d) for p in ("trn2", "p5en") for d in ("trn2", "p5en")}
    assert {(c.prefill.tp, c.decode.tp) for c in PR} >= {(1, 1), (2, 1), (1, 2)}
    assert ("0.29.0", "0.32.0") in {(c.prefill.vllm, c.decode.vllm) for c in PR}
    loads = {kind for c in PR for kind in c.load}
    assert loads >= {"prefix", "aborts"}


def test_tiers_include_the_smaller_ones():
    names = [{c.name for c in cells.cells(MATRIX, tier)} for tier in cells.TIERS]
    assert names[0] < names[1] < names[2]


def test_vllms_own_connectors_have_homogeneous_cells():
    theirs = [c for c in cells.cells(MATRIX, "merge") if c.connector != "neuron-push"]
    assert {c.connector for c in theirs} == {"vllm-push", "vllm-pull"}
    assert all(c.prefill == c.decode for c in theirs)


@pytest.mark.parametrize("text", ["h100", "trn2/x2", "trn2@1", "p5en/tp"])
def test_nonsense_sides_are_refused(text):
    with pytest.raises(ConfigError, match="device"):
        cells.Side.parse(text, "0.32.0")


def test_sides_have_their_devices_block_size():
    assert str(cells.Side.parse("trn2", "0.32.0")) == "trn2/tp1/b32@0.32.0"
    assert str(cells.Side.parse("p5en/tp2/b48@0.29.0", "0.32.0")) == "p5en/tp2/b48@0.29.0"


def test_cells_that_differ_in_load_share_engines():
    first, *_ = PR
    alike = [c for c in PR if (c.prefill, c.model) == (first.prefill, first.model)]
    other = [c for c in alike if c is not first]
    assert other and all(pool.keys(c)[0] == pool.keys(first)[0] for c in other)


def test_loads_repeat_for_the_same_seed_and_the_storm_is_200():
    assert load.flat(load.batches("burst", 16, "x")) == load.flat(load.batches("burst", 16, "x"))
    storm = load.flat(load.batches("aborts", 16, "x"))
    assert len(storm) == 200 and sum(r.give_up_after is not None for r in storm) > 100


def test_hardware_needs_both_sides(tmp_path, monkeypatch):
    node = {
        "device": "trn2", "role": "prefill", "name": "p0", "url": "http://p:8100", "host": "p",
        "side_port": 5600, "served": "m", "vllm": "0.32.0",
    }  # fmt: skip
    path = tmp_path / "nodes.yaml"
    path.write_text(json.dumps([node]))
    monkeypatch.setenv(hardware.VARIABLE, str(path))
    nodes = hardware.inventory()
    assert hardware.pair(cell(), nodes) is None
    path.write_text(json.dumps([node, {**node, "device": "p5en", "role": "decode", "block": 16}]))
    assert hardware.pair(cell(), hardware.inventory()) is not None
    monkeypatch.delenv(hardware.VARIABLE)
    assert hardware.inventory() == []


def test_reports_say_the_same_in_every_form(tmp_path):
    outcomes = [Outcome(cell(), state, "why" if "passed" not in state else "") for state in State]
    report.write(outcomes, tmp_path, "pr")
    rows = json.loads((tmp_path / "matrix.json").read_text())
    assert [row["state"] for row in rows] == [str(state) for state in State]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("5", "1", "2")
    page = (tmp_path / "matrix.html").read_text()
    assert all(state in page for state in State) and "trn2/tp1/b32@0.32.0" in page


def test_what_failed_may_be_tried_again_unless_something_was_wrong(tmp_path):
    lost = Outcome(cell(prefill="trn2"), State.FAILED, "did not start")
    fine = Outcome(cell(prefill="cpu"), State.PASSED_EMULATED, figures={"wrong_rows": 0})
    report.write([lost, fine], tmp_path, "pr")
    assert report.failed(tmp_path) == [lost.cell.name]
    for figures in ({"wrong_rows": 1}, {"wrong_rows": 0, "wrong_answers": 2}):
        wrong = Outcome(cell(prefill="p5en"), State.FAILED, "differs", figures=figures)
        report.write([lost, fine, wrong], tmp_path, "pr")
        with pytest.raises(ConfigError, match="would hide it"):
            report.failed(tmp_path)
        assert command.main(["--failed", "--out", str(tmp_path)]) == 2


def test_an_interrupted_run_reports_what_there_is_and_fails(monkeypatch, tmp_path):
    ended = []

    def run(cell, *_):
        if ended:
            raise KeyboardInterrupt
        ended.append(cell)
        return Outcome(cell, State.PASSED_EMULATED)

    monkeypatch.setattr(command, "_run", run)
    before = signal.getsignal(signal.SIGTERM)
    assert command.main(["--out", str(tmp_path)]) == 1
    signal.signal(signal.SIGTERM, before)
    rows = json.loads((tmp_path / "matrix.json").read_text())
    assert [row["state"] for row in rows] == ["passed-emulated"] + ["not-run"] * (len(PR) - 1)


def test_the_command_lists_cells_for_a_plan_job(capsys):
    assert command.main(["--list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["cell"] for row in rows] == [c.name for c in PR]
    assert {row["where"] for row in rows} == {"emulated"}
    assert command.main(["--only", "no such cell"]) == 2


def test_every_pair_of_devices_works_with_every_model_that_both_hold():
    refusing = [c for c in cells.cells(MATRIX, "nightly") if c.refused]
    assert {c.model for c in refusing} <= {"tiny-mamba"}
    devices = {c.devices for c in cells.cells(MATRIX, "merge") if not c.refused}
    assert devices == {f"{p}>{d}" for p in DEVICES for d in DEVICES}


def test_a_cell_that_takes_more_cores_is_not_run(monkeypatch):
    monkeypatch.setattr(command.os, "sched_getaffinity", lambda _: {0, 1})
    args = command.parser().parse_args([])
    timed = next(c for c in cells.cells(MATRIX, "nightly") if c.timed)
    outcome = command._run(timed, None, None, [], args)
    assert outcome.state is State.NOT_RUN
    assert outcome.reason == f"needs {timed.cores} cores, here are 2"


class Started:
    """Engines that are ready at once."""

    def __init__(self, key):
        self.key, self.name, self.running = key, key.name, False
        self.elapsed = 0.0

    def start(self):
        self.running = True

    def stop(self):
        self.running = False

    def check(self, timeout):
        return True


def test_engines_of_the_next_cell_start_while_this_one_runs_if_there_is_room(monkeypatch, tmp_path):
    for most, early in ((8, True), (2, False)):
        made = pool.Pool(tmp_path, most, lambda _: None)
        monkeypatch.setattr(made, "_make", Started)
        here, following = PR[0], next(c for c in PR if c.decode.device == "trn2")
        made.get(here, following)
        assert {key.name for key in pool.keys(here)} <= {key.name for key in made._running}
        assert (pool.keys(following)[1] in made._running) is early
        made.get(following)
        assert made._ranks() <= most


def test_an_engine_that_died_while_it_waited_is_started_again(monkeypatch, tmp_path):
    made = pool.Pool(tmp_path, 8, lambda _: None)
    monkeypatch.setattr(made, "_make", Started)
    first, _ = made.get(PR[0])
    first.stop()
    again, _ = made.get(PR[0])
    assert again is not first and again.running


def test_timed_cells_have_engines_of_their_own():
    timed = [c for c in cells.cells(MATRIX, "nightly") if c.timed]
    assert timed and all("timed:" in c.name and c.load == ("burst",) for c in timed)
    untimed = pool.keys(next(c for c in PR if c.prefill == timed[0].prefill))[0]
    key = pool.keys(timed[0])[0]
    assert key != untimed and key.name != untimed.name


@pytest.mark.parametrize(("own", "words"), [(0.1, ""), (0.3, "more than 20%")])
def test_a_timed_cell_fails_when_emulation_took_too_much_of_the_time(monkeypatch, own, words):
    class Place:
        name, engine = "engine", type("Engine", (), {"log": Path("/nonexistent")})

        def __init__(self):
            self.seen = dict.fromkeys(checks.COUNTS, 0)

        def totals(self):
            return dict(self.seen)

    place = Place()

    def settled(prefill, decode):
        place.seen |= {"context_tokens": 5, "writes_early": 2, "own_seconds": own}
        place.seen |= {"modelled_seconds": 1.0}
        return place.totals(), place.totals()

    monkeypatch.setattr(checks, "_send", lambda *_: [])
    monkeypatch.setattr(checks, "_refusal", lambda *_: "")
    monkeypatch.setattr(checks, "_left", lambda _: [])
    monkeypatch.setattr(checks, "_settled", settled)
    timed = dataclasses.replace(cell(), timed="qwen3-32b-tp8-p5en")
    problems = checks.run(timed, place, place).problems
    assert [words in problem for problem in problems] == ([True, True] if words else [])
    place = Place()
    assert checks.run(cell(), place, place).problems == []
