"""Result files: complete ones count, and only those."""

import json

import pytest

from neuron_push.bench.sweep import plot, results
from neuron_push.bench.sweep.cells import Cell, Run
from neuron_push.errors import ConfigError
from tests.bench.kit import study, write

CELL = Cell(4096, 8.0, 64)
RUN = Run("push", CELL, 1)
RAW = {
    "completed": 2, "failed": 0, "num_prompts": 2, "ttfts": [0.1, 0.2], "start_times": [1.0, 2.0],
    "itls": [[0.01, 0.02, 0.03], [0.02]], "output_lens": [4, 2], "generated_texts": ["a", "b"],
    "mean_ttft_ms": 150.0,
}  # fmt: skip


def own(**fields):
    return results.Own(**{"column": "push", "repeat": 1, "seed": RUN.seed, **fields})


def test_time_per_token_is_that_of_the_tokens_after_the_first():
    assert results.tpots(RAW) == [0.02, 0.02]


def test_a_finished_file_keeps_vllms_fields_and_is_not_measured_again(tmp_path):
    assert not results.finished(tmp_path, RUN)
    raw = {**json.loads(json.dumps(RAW)), "tokenizer_id": "/a/machine/models/qwen3"}
    results.finish(raw, own(), tmp_path / RUN.file)
    assert results.finished(tmp_path, RUN)
    found = json.loads((tmp_path / RUN.file).read_text())
    assert found["tokenizer_id"] == "qwen3"  # no path of this machine
    assert found["mean_ttft_ms"] == 150.0 and "itls" not in found
    assert [path.name for path in tmp_path.iterdir()] == [RUN.file]


def test_what_a_broken_off_run_left_is_measured_again(tmp_path):
    path = write(tmp_path, "push", CELL, 1, 0.2)
    path.write_text(path.read_text()[:100])
    assert not results.finished(tmp_path, RUN)


def test_a_file_with_requests_missing_is_measured_again(tmp_path):
    path = write(tmp_path, "push", CELL, 1, 0.2)
    path.write_text(path.read_text().replace('"completed": 4', '"completed": 3'))
    assert not results.finished(tmp_path, RUN)


def test_a_file_of_another_load_is_measured_again(tmp_path):
    write(tmp_path, "push", CELL, 1, 0.2)
    assert not results.finished(tmp_path, Run("push", CELL, 2))
    (tmp_path / Run("push", CELL, 2).file).write_bytes((tmp_path / RUN.file).read_bytes())
    assert not results.finished(tmp_path, Run("push", CELL, 2))


def test_a_file_under_a_foreign_name_is_refused(tmp_path):
    path = write(tmp_path, "push", CELL, 1, 0.2).rename(tmp_path / "pull_qps8_in1_out1_iter1.json")
    with pytest.raises(ConfigError, match="says that it is of push"):
        results.read(path)
    with pytest.raises(ConfigError, match="no results"):
        results.load(tmp_path / "none")


def test_unfit_runs_do_not_count(tmp_path):
    write(tmp_path, "push", CELL, 1, 0.2)
    write(tmp_path, "push", CELL, 2, 0.9, unfit=["late"])
    found = results.load(tmp_path)
    assert len(found) == 2
    assert [r.neuron_push.repeat for r in results.of(found, "push", CELL)] == [1]


def test_charts_are_drawn_as_png_and_svg_and_name_every_column(tmp_path):
    pytest.importorskip("matplotlib")
    study(tmp_path)
    write(tmp_path, "push", Cell(4096, 9.0, 64), 1, 0.2, fragmented=True)
    paths = plot.draw(results.load(tmp_path), tmp_path)
    names = {path.name for path in paths}
    assert {"ttft.png", "ttft.svg", "tpot.png", "tpot.svg", "ttft-fragmented.svg"} <= names
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    again = tmp_path / "again"
    again.mkdir()
    plot.draw(results.load(tmp_path), again)
    assert (again / "ttft.svg").read_bytes() == (tmp_path / "ttft.svg").read_bytes()
