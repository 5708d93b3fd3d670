"""The benchmark of faults makes each of them; its figures belong to a quiet machine."""

from __future__ import annotations

import json

import pytest

from neuron_push import cli
from neuron_push.bench import faults
from neuron_push.config import Config

pytestmark = [pytest.mark.real_nixl, pytest.mark.slow]


def test_bench_faults_prints_every_figure_with_its_target(capsys):
    assert cli.main(["bench", "faults", "--json", "--repeat", "1", "--no-engines"]) in (0, 1)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = {row["name"]: row for row in report["figures"]}
    wanted = faults.targets(Config())
    assert wanted.keys() <= figures.keys()
    for name, target in wanted.items():
        assert figures[name]["target_ms"] == target
        assert 0 <= figures[name]["median_ms"] < target + 10_000
    assert figures["P hangs: D told"]["median_ms"] > Config().silence * 500
