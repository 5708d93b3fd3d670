"""Statistics, verdicts, and that a page is checked against its raw files."""

import json
import math

import numpy as np
import pytest

from neuron_push.bench.sweep import claims, report, results, statistics
from neuron_push.bench.sweep.cells import Cell
from neuron_push.bench.sweep.claims import Claim
from neuron_push.errors import ConfigError
from tests.bench.kit import study, write

CELL = Cell(4096, 8.0, 64)


def verdict(folder, files=None, **fields):
    claim = Claim(**{"id": "c", "text": "t", "metric": "ttft", "column": "push", **fields})
    return claims.judge([claim], results.load(folder), files or {})[0]


def test_percentiles_are_numpys():
    values = list(np.random.default_rng(1).random(37))
    for share in (0.0, 0.1, 0.5, 0.9, 1.0):
        assert statistics.percentile(values, share) == pytest.approx(np.quantile(values, share))
    with pytest.raises(ValueError, match="nothing"):
        statistics.median([])


def test_the_interval_of_a_ratio_is_students_over_paired_rounds():
    found = statistics.ratio([1.0, 1.1, 0.9, 1.0, 1.05], [2.0, 2.0, 2.0, 2.0, 2.0])
    logs = np.log(np.array([1.0, 1.1, 0.9, 1.0, 1.05]) / 2)
    half = 2.776 * logs.std(ddof=1) / math.sqrt(5)
    assert found.value == pytest.approx(math.exp(logs.mean()))
    assert (found.low, found.high) == pytest.approx(
        (math.exp(logs.mean() - half), math.exp(logs.mean() + half))
    )


def test_what_moves_both_sides_of_a_pair_alike_does_not_widen_the_interval():
    found = statistics.ratio([1.0, 5.0, 2.0], [2.0, 10.0, 4.0])
    assert (found.low, found.high) == pytest.approx((0.5, 0.5))


def test_one_round_has_no_interval():
    found = statistics.ratio([1.0], [2.0])
    assert (found.value, found.low, found.high) == (0.5, 0.0, math.inf)


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_cannot_be_paired_is_refused(ours, theirs):
    with pytest.raises(ValueError, match=r"paired|positive"):
        statistics.ratio(ours, theirs)


@pytest.mark.parametrize(
    ("rule", "state"),
    [
        ({"at_most": 0.6}, "holds"),
        ({"at_most": 0.4}, "missed"),
        ({"times_better": 1.9}, "holds"),
        ({"times_better": 2.1}, "missed"),
        ({"not_worse": True}, "holds"),
    ],
)
def test_each_rule_holds_and_misses(tmp_path, rule, state):
    # Twice as good, less one to three percent.
    study(tmp_path)
    assert verdict(tmp_path, against="nixl-push", cells=("4kx8",), **rule).state == state


def test_worse_beyond_the_interval_is_missed_and_within_it_is_not(tmp_path):
    for repeat, ours in enumerate((0.30, 0.31, 0.32), 1):
        write(tmp_path, "push", CELL, repeat, ours)
        write(tmp_path, "nixl-push", CELL, repeat, 0.2)
        write(tmp_path, "nixl-pull", CELL, repeat, (0.2, 0.5, 0.3)[repeat - 1])
    assert verdict(tmp_path, against="nixl-push", not_worse=True).state == "missed"
    assert verdict(tmp_path, against="nixl-pull", not_worse=True).state == "holds"


def test_near_takes_its_bound_or_an_interval_that_reaches_down_to_one(tmp_path):
    for repeat, tpot in enumerate((0.0061, 0.0066, 0.0070), 1):
        write(tmp_path, "push", CELL, repeat, 0.2, tpot)
        write(tmp_path, "floor-tpot", CELL, repeat, 0.2, 0.006)
        write(tmp_path, "nixl-push", CELL, repeat, 0.2, 0.0059 + repeat * 1e-6)
    near = {"metric": "tpot", "near": 1.03}
    found = verdict(tmp_path, against="floor-tpot", **near)
    assert found.findings[0].ratio > 1.03 and found.state == "holds"
    one = verdict(tmp_path, column="floor-tpot", against="nixl-push", **near)
    assert one.findings[0].ratio < 1.03 and one.state == "holds"
    assert verdict(tmp_path, column="nixl-push", against=5.0, **near).state == "missed"


def test_one_round_far_off_is_not_excused_by_the_interval_that_it_lacks(tmp_path):
    write(tmp_path, "push", CELL, 1, 0.4)
    write(tmp_path, "nixl-push", CELL, 1, 0.2)
    assert verdict(tmp_path, against="nixl-push", near=1.03).state == "missed"


def test_a_claim_over_all_cells_is_missed_if_one_cell_misses(tmp_path):
    study(tmp_path)
    for repeat in (1, 2, 3):
        write(tmp_path, "push", Cell(1024, 1.0, 64), repeat, 0.3 + repeat / 1e3)
        write(tmp_path, "nixl-push", Cell(1024, 1.0, 64), repeat, 0.1)
    found = verdict(tmp_path, against="nixl-push", not_worse=True)
    assert found.state == "missed"
    assert [finding.holds for finding in found.findings] == [False, True, True]


def test_what_was_not_measured_does_not_hold(tmp_path):
    study(tmp_path)
    rule = {"at_most": 1.0}
    for fields in (
        {"against": "pull"},
        {"against": "nixl-push", "cells": ("1kx1", "4kx8")},
        {"against": "nixl-push", "regime": "fragmented"},
        {"file": "notice.json", "value": ("busy",), "metric": ""},
    ):
        found = verdict(tmp_path, **{**fields, **rule})
        assert found.state == "not measured" and found.missing


def test_cells_beyond_what_prefill_sustains_are_left_out_where_the_claim_says_so(tmp_path):
    heavy = Cell(16384, 4.0, 64)
    write(tmp_path, "push", heavy, 1, 0.2)
    write(tmp_path, "push", CELL, 1, 0.2)
    found = results.load(tmp_path)
    assert claims.sustained(CELL, found) and not claims.sustained(heavy, found)
    said = verdict(tmp_path, against=200.0, sustained=True, near=1.1)
    assert [finding.where for finding in said.findings] == [CELL.name]


def test_claims_on_other_files_compare_two_places_or_a_number(tmp_path):
    study(tmp_path)
    files = {"handover.json": {"16384": {"push": 40.0, "nixl": 200.0}}}
    common = {"file": "handover.json", "value": ("16384", "push"), "metric": ""}
    found = verdict(tmp_path, files, against=("16384", "nixl"), at_most=0.25, **common)
    assert found.state == "holds" and found.findings[0].ratio == 0.2
    assert verdict(tmp_path, files, against=30.0, at_most=1, **common).state == "missed"


def test_the_shipped_claims_are_valid_and_each_has_one_rule(tmp_path):
    shipped = claims.load()
    assert len({claim.id for claim in shipped}) == len(shipped)
    path = tmp_path / "claims.yaml"
    path.write_text("[{id: a, text: b, metric: ttft, at_most: 1, near: 2}]")
    with pytest.raises(ConfigError, match="exactly one rule"):
        claims.load(path)
    path.write_text("[{id: a, text: b, mettric: ttft}]")
    with pytest.raises(ConfigError, match="mettric"):
        claims.load(path)


# ---------------------------------------------------------------------- the page


def run(folder, *, check=False):
    class Args:
        results, page, claims = folder, folder / "report.html", claims.SHIPPED

    Args.check = check
    return report.main(Args)


@pytest.fixture
def reported(tmp_path):
    study(tmp_path)
    (tmp_path / "notice.json").write_text(json.dumps({"busy": {"p50_ms": 0.5, "p99_ms": 3.0}}))
    run(tmp_path)
    return tmp_path


def test_a_page_agrees_with_the_files_it_was_made_of(reported):
    assert run(reported, check=True) == 0
    text = (reported / "report.html").read_text()
    assert "<svg" in text and "NixlPushConnector" in text and "src=" not in text
    assert "Where TTFT goes" in text


def test_a_raw_file_that_was_changed_does_not_pass(reported, capsys):
    path = next(reported.glob("push_qps8*iter1.json"))
    path.write_text(path.read_text().replace('"ttfts": [0.20', '"ttfts": [0.10'))
    assert run(reported, check=True) == 1
    assert "is not the one it was made of" in capsys.readouterr().out


def test_a_raw_file_that_is_gone_or_new_does_not_pass(reported, capsys):
    next(reported.glob("push_qps8*iter1.json")).unlink()
    write(reported, "push", CELL, 9, 0.1)
    assert run(reported, check=True) == 1
    assert "is not there" in capsys.readouterr().out


def test_a_verdict_changed_inside_the_page_does_not_pass(reported, capsys):
    path = reported / "report.html"
    text = path.read_text()
    assert '"state": "not measured"' in text
    path.write_text(text.replace('"state": "not measured"', '"state": "holds"'))
    assert run(reported, check=True) == 1
    assert "the page says holds, the files not measured" in capsys.readouterr().out


def test_a_figure_changed_only_where_people_look_does_not_pass(reported, capsys):
    path = reported / "report.html"
    text = path.read_text()
    assert text.count("<td class=n>204.00") == 2
    path.write_text(text.replace("<td class=n>204.00", "<td class=n>104.00"))
    assert run(reported, check=True) == 1
    assert "what it shows is not what the files give" in capsys.readouterr().out


def test_a_page_of_something_else_is_refused(reported):
    (reported / "report.html").write_text("<html></html>")
    with pytest.raises(ConfigError, match="not a page"):
        run(reported, check=True)
