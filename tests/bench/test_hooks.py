"""`bench hooks` on made-up numbers: what is taken off, what a request may cost, and who judges."""

from argparse import Namespace

import pytest

from neuron_push.bench import hooks
from neuron_push.bench.pair import NO_OP, OURS, PULL, PUSH


def step(kind, us, blocks=0):
    return {"kind": kind, "cpu": us * 1000, "wall": us * 2000, "blocks": blocks}


def found(chunk, end, quiet=5.0, tokens=1024, chunks=1, least=60):
    """What one connector cost: each request the same but for one that met something else."""
    blocks = tokens // 16
    request = [step("chunk", chunk, blocks // chunks)] * chunks + [step("end", end)]
    outlier = [step("chunk", 900 * chunk, blocks // chunks)] * chunks + [step("end", 900 * end)]
    cost = hooks._summary([[request, outlier, request]] * 2)
    steps = [{"cpu": quiet * 1000, "wall": quiet * 1000, "metadata_bytes": size}
             for size in (52, least)]  # fmt: skip
    parked = hooks._quiet(steps)
    return {
        "quiet": {"P": parked, "D": parked}, "idle_core": 0.004, "idle_process": 0.005,
        "cases": {f"{tokens} contiguous": {"P": cost, "D": cost}},
    }  # fmt: skip


def report(ours, push=None, pull=None, no_op=None, **size):
    measured = {
        NO_OP: no_op or found(10, 10, **size),
        OURS: ours,
        PUSH: push or found(400, 400, **size),
        PULL: pull or found(300, 300, **size),
    }
    return hooks._report(measured, Namespace(sizes=[1024], repeat=3))


def test_a_request_costs_what_its_steps_cost_beyond_the_no_op():
    row, _ = report(found(40, 15))["rows"]
    assert (row["case"], row["side"]) == ("1024 contiguous", "P")
    assert row["us"] == pytest.approx(40 + 15 - 2 * 10)
    assert row["rivals_us"] == {PUSH: pytest.approx(780), PULL: pytest.approx(580)}


def test_its_budget_is_that_of_its_steps_and_blocks():
    row, _ = report(found(40, 15))["rows"]
    assert row["budget_us"] == pytest.approx(2 * 30 + 64 * 0.02)
    assert row["within_budget"] and row["below_rivals"]
    row, _ = report(found(60, 25))["rows"]
    assert not row["within_budget"] and row["below_rivals"]


def test_budgets_are_held_against_the_best_round_and_rivals_against_the_median():
    def cost(*rounds):
        return hooks._summary([[[step("chunk", us, 64)]] * 3 for us in rounds])

    summed = cost(80, 35, 90)
    assert (summed["us"], summed["best_us"]) == (80, 35)
    assert summed["kinds"]["chunk"]["best_us"] == 35
    measured = found(40, 15)
    measured["cases"]["1024 contiguous"] = {"P": summed, "D": summed}
    still = found(10, 10)
    still["cases"]["1024 contiguous"] = dict.fromkeys("PD", cost(10, 5, 12))
    row, _ = report(measured, no_op=still)["rows"]
    assert (row["us"], row["best_us"]) == (70, 30)
    assert row["within_budget"]


def test_a_large_request_has_a_budget_of_its_own():
    size = {"tokens": 16384, "chunks": 15}
    made = report(found(28, 28, **size), **size)
    assert made["rows"][0]["budget_us"] == 300
    assert made["within_target"]["request_of_16k"]
    made = report(found(32, 32, **size), **size)
    assert not made["within_target"]["request_of_16k"]
    assert made["within_target"]["every_kind_of_step"]


@pytest.mark.parametrize(
    ("ours", "missed"),
    [
        (found(40, 15), set()),
        (found(42, 15), {"every_kind_of_step"}),
        (found(40, 15, quiet=15.1), {"quiet_step"}),
        (found(40, 15, least=200), {"quiet_metadata"}),
        ({**found(40, 15), "idle_core": 0.01}, {"idle"}),
        (found(300, 300), {"every_kind_of_step", "request_by_its_steps", "below_rivals"}),
    ],
)
def test_each_target_is_judged_by_itself(ours, missed, capsys):
    made = report(ours)
    assert {name for name, met in made["within_target"].items() if not met} == missed
    hooks._print_table(made)
    assert capsys.readouterr().out.count("OVER TARGET") == len(missed)


def test_a_rival_that_did_not_run_beats_nobody_and_we_must_have_run():
    made = report(found(40, 15), pull={"error": ["no nixl"]})
    assert set(made["rows"][0]["rivals_us"]) == {PUSH}
    assert made["costs"][PULL] == {"error": ["no nixl"]}
    made = report({"error": ["broken"]})
    assert made["rows"] == [] and made["within_target"] == {"ran": False}
    hooks._print_table(made)
