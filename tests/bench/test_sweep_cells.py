"""Cells, the names of their files, the order of runs, and the time left."""

from itertools import groupby

import pytest

from neuron_push.bench.sweep.cells import Cell, Run, parse, rounds
from neuron_push.bench.sweep.columns import COLUMNS, DEFAULT, KINDS, chosen
from neuron_push.bench.sweep.progress import Progress, duration
from neuron_push.bench.sweep.results import NAME
from neuron_push.errors import ConfigError

CELLS = parse(["1kx1", "4kx8"], 64)


def test_cells_are_written_as_input_by_rate():
    assert parse(["4kx8", "1000x0.5"], 64) == [Cell(4096, 8.0, 64), Cell(1000, 0.5, 64)]


@pytest.mark.parametrize("text", ["4k", "x8", "4kx", "4kx0", "-1x2", "4mx2"])
def test_a_bad_cell_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match=r"4kx8|positive"):
        parse([text], 64)


def test_files_have_the_published_names():
    run = Run("nixl-push", Cell(16384, 0.5, 128), 3)
    assert run.file == "nixl-push_qps0.5_in16384_out128_iter3.json"
    assert NAME.fullmatch(run.file).groupdict() == {
        "column": "nixl-push", "qps": "0.5", "input": "16384", "output": "128", "repeat": "3",
    }  # fmt: skip


def test_scattered_blocks_have_files_of_their_own():
    (run,) = rounds(["push"], CELLS[:1], 1, together=True, fragmented=True)
    assert run.file == "push-fragmented_qps1_in1024_out64_iter1.json"


@pytest.mark.parametrize("together", [True, False])
def test_every_round_measures_every_column_in_every_cell_once(together):
    runs = list(rounds(DEFAULT, CELLS, 3, together=together))
    assert len(runs) == len(set(runs)) == 3 * len(CELLS) * len(DEFAULT)
    assert [run.repeat for run in runs] == sorted(run.repeat for run in runs)


def test_columns_take_turns_within_a_cell_and_no_one_is_always_first():
    runs = list(rounds(["a", "b", "c"], CELLS, 3, together=True))
    first = [next(group).column for _, group in groupby(runs, lambda run: (run.repeat, run.cell))]
    assert set(first) == {"a", "b", "c"}


def test_without_room_for_all_engines_a_column_is_measured_in_one_go_per_round():
    runs = list(rounds(["a", "b"], CELLS, 2, together=False))
    stays = [(r, c) for (r, c), _ in groupby(runs, lambda run: (run.repeat, run.column))]
    assert len(stays) == len(set(stays)) == 4


def test_all_columns_of_a_round_see_the_same_prompts_and_arrivals():
    a, b = (Run(column, CELLS[0], 2) for column in ("push", "nixl-pull"))
    assert a.seed == b.seed
    assert a.seed != Run("push", CELLS[0], 3).seed != Run("push", CELLS[1], 3).seed


def test_a_run_lasts_as_long_as_asked_and_has_some_requests_at_any_rate():
    assert Run("push", Cell(1, 8.0, 1), 1).prompts(20) == 160
    assert Run("push", Cell(1, 0.1, 1), 1).prompts(5) == 4


def test_every_column_has_its_engines():
    assert {column.kind for column in COLUMNS.values()} <= set(KINDS)
    assert list(chosen(["push", "nixl-pull"])) == ["push", "nixl-pull"]
    with pytest.raises(ConfigError, match="known: push"):
        chosen(["pushh"])


def test_time_left_follows_what_runs_have_taken():
    now = 0.0
    progress = Progress(10, 20.0, clock=lambda: now)
    assert progress.left == 250.0  # nothing known but the plan
    now = 60.0
    progress.step()
    progress.step()
    assert progress.left == 240.0
    assert progress.line("x") == "[3/10] x  4 min left"
    assert [duration(s) for s in (40, 700, 7500)] == ["40 s", "12 min", "2 h 05 min"]
