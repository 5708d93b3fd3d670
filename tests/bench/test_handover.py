"""What lies between the engines: from records, moments and traces to figures."""

import json
import subprocess
import sys

import numpy as np
import pytest

from neuron_push.bench.handover import command, drive, limit, notice
from neuron_push.bench.sweep import engines, measure, proxy, results
from neuron_push.bench.sweep.command import SHIPPED
from neuron_push.bench.sweep.measure import Moment, Moments
from neuron_push.cli import make_parser
from neuron_push.emulation import fleet
from neuron_push.errors import ConfigError, NeuronPushError
from neuron_push.protocol import TraceEvent
from neuron_push.trace.collect import Clock, Track


def track(*events, tracing=True):
    made = [TraceEvent(at, name, transfer, "", seconds) for name, transfer, at, seconds in events]
    return Track("x", Clock(0, 0), made, tracing=tracing)


def test_a_notice_counts_from_the_return_of_the_last_post():
    prefill = track(("posted", "a", 1.0, 0.1), ("posted", "a", 2.0, 0.2), ("posted", "b", 3.0, 0))
    decode = track(("received", "a", 2.203, 0), ("received", "c", 9.0, 0))
    assert notice.delays([prefill, decode]) == {"a": pytest.approx(0.003)}


def test_a_fleet_that_does_not_trace_is_said_to_be_so():
    with pytest.raises(NeuronPushError, match="traces"):
        notice.delays([track(tracing=False)])


def test_moments_are_read_from_where_the_file_ended_and_by_the_clients_id(tmp_path):
    path = tmp_path / "P-0.moments.jsonl"
    path.write_text(json.dumps(["cmpl-old-0", 1.0, 2.0]) + "\n")
    look = Moments(path)
    with path.open("a") as file:
        file.write(json.dumps(["cmpl-abc-0-1a2b3c4d", 3.0, 4.0]) + "\n" + '["cmpl-half')
    assert look.read() == {"abc": Moment(3.0, 4.0)}


def test_a_handover_lies_between_what_the_two_devices_saw():
    own = results.Own(column="push", repeat=1, seed=1)
    records = [
        proxy.Record(request="a", client="c", arrived=0.0, prefilled=1.0, first=1.5),
        proxy.Record(request="b", client="c", arrived=0.0, error="x"),
    ]
    seen = {"prefill": {"a": Moment(0.5, 0.9)}, "decode": {"a": Moment(1.1, 1.2)}}
    measure.handovers(own, records, seen)
    assert own.handover == pytest.approx([0.2])
    assert own.handover_token == pytest.approx([0.3])
    assert own.handover_client == pytest.approx([0.5])
    assert own.to_last_forward == pytest.approx([0.9]) and own.back == pytest.approx([0.3])


def test_a_run_is_unfit_by_its_own_share_and_not_by_what_was_before():
    before = {"modelled_seconds": 10.0, "own_seconds": 9.0, "late_seconds": 9.0, "wrong_rows": 0}
    after = {"modelled_seconds": 20.0, "own_seconds": 10.0, "late_seconds": 9.5, "wrong_rows": 0}

    def named(summary, **more):
        return {"P-0.json": {"name": "P-0", **summary, **more}}

    assert measure.unfit(named(before), named(after)) == []
    late = measure.unfit(named(before), named(after, late_seconds=12.0))
    assert len(late) == 1 and "late" in late[0]
    assert "3 wrong rows" in measure.unfit(named(before), named(after, wrong_rows=3))[0]


@pytest.mark.parametrize(("scattered", "copies"), [(False, 4), (True, 4 * 8)])
def test_the_limit_moves_the_bytes_that_are_left_whatever_their_arrangement(scattered, copies):
    load = limit.Load(tokens=120, layers=4, page_bytes=64, block_tokens=16, scattered=scattered)
    rows = load.rows(1 << 20)
    assert load.pages == 8 and load.nbytes == 4 * 8 * 64
    assert len(rows) == copies and rows[:, 1].sum() == load.nbytes
    ends = rows[:, 0] + rows[:, 1]
    assert rows[:, 0].min() >= 1 << 20 and ends.max() <= (1 << 20) + 2 * load.nbytes
    assert len(np.unique(rows[:, 0])) == copies
    if scattered:  # no two are neighbours
        assert not np.isin(ends, rows[:, 0]).any()


def test_the_table_shows_every_case_and_the_parts():
    figures = {"contiguous": {"1024": {
        "push": {"handover_ms": 12.3, "p90_ms": 15.0, "first_token_ms": 18.0, "copies": 512,
                 "parts_ms": {"wire": 9.9}},
        "limit": {"total_ms": 14.0, "write_ms": 8.4, "copies": 64},
    }}}  # fmt: skip
    _, push, least = command._lines(figures)
    assert "12.3" in push and "512 copies a request, wire 9.9" in push
    assert "write 8.4, 64 copies" in least


def test_memory_is_that_of_whole_process_groups():
    child = subprocess.Popen(
        [sys.executable, "-c", "b = bytearray(64 << 20); print(1, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    with child:
        child.stdout.readline()
        assert 64 << 20 < measure.peak([child.pid]) < 128 << 20
        child.stdin.close()


def test_figures_are_medians_in_milliseconds():
    found = drive.milliseconds([0.001, 0.002, 0.1])
    assert (found["p50_ms"], found["n"]) == (2.0, 3)


def freed_last_first(pool, requests):
    """The block lists of vLLM's pool, one request after the other."""
    free, lists = list(range(1, pool)), []
    for blocks in requests:
        lists.append(free[:blocks])
        free = free[blocks:] + lists[-1][::-1]
    return lists


def test_blocks_lie_side_by_side_on_both_sides_however_often_pools_were_used():
    template = engines.Template.of(fleet.load(SHIPPED))
    own = command.aligned(template)
    requests = [1024] * 5 + [64] * 9 + [256] * 9 + [1024] * 9

    def broken(one):
        sides = zip(
            freed_last_first(one.prefill.blocks, requests),
            freed_last_first(one.decode.blocks, requests), strict=True,
        )  # fmt: skip
        steps = [(np.diff(a), np.diff(b)) for a, b in sides]
        return sum(int(np.sum((a != b) | (abs(a) != 1))) for a, b in steps)

    # Where a list comes to the end of a pool it goes on elsewhere, on both sides.
    assert broken(own) <= 100 < 2000 < broken(template)
    for tokens in command.LENGTHS:
        prompt, size = tokens - command.ANSWER, 16
        assert -(-prompt // size) == -(-(prompt + 2) // size) == tokens // size


def test_a_fleet_whose_kv_is_not_known_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "fleet.yaml"
    path.write_text(
        "{model: tiny-gqa, engines: [{name: p, role: prefill}, {name: d, role: decode}]}"
    )
    words = ["bench", "handover", "--fleet", str(path), "--out", str(tmp_path / "out")]
    with pytest.raises(ConfigError, match="not tiny-gqa: qwen3-32b-rank"):
        command.main(make_parser(words).parse_args(words))
    assert not (tmp_path / "out").exists()
