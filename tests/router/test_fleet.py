"""Admission by free KV, quarantine of pairs, members that come and go."""

from __future__ import annotations

import pytest

from neuron_push.router.fleet import Fleet, NoPair, NoRoom
from neuron_push.router.jobs import Job
from neuron_push.router.quarantine import LONGEST, Quarantine
from tests.router.fleet import who
from tests.router.test_policies import engines


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def fleet_of(p, d, clock=None, **decode):
    return Fleet(engines("prefill", p), engines("decode", d, **decode), clock=clock or Clock())


def test_blocks_promised_to_a_push_are_not_promised_twice():
    fleet = fleet_of(1, 1, total=10, block=16)
    (decode,) = fleet.decode
    job = Job(prompt_tokens=80, output_tokens=16)
    assert fleet.choose(job).decode is decode
    decode.promise("one", job)
    with pytest.raises(NoRoom, match="4 blocks"):
        fleet.choose(job)
    decode.forgive("one")
    assert fleet.choose(job)


def test_an_answer_that_was_asked_for_before_a_dispatch_does_not_know_of_it():
    (decode,) = fleet_of(1, 1, total=10, block=16).decode
    decode.begin_asking()
    decode.promise("one", Job(prompt_tokens=80, output_tokens=0))
    sizes = {"free_blocks": 10, "total_blocks": 20, "block_tokens": 16}
    decode.seen(who("d", role="kv_consumer", **sizes))
    assert decode.free_blocks == 5
    decode.begin_asking()
    decode.seen(who("d", role="kv_consumer", **sizes | {"free_blocks": 5}))
    assert decode.free_blocks == 5


def test_a_prompt_larger_than_any_cache_is_left_to_the_engine_to_refuse():
    fleet = fleet_of(1, 1, total=10, block=16)
    assert fleet.choose(Job(prompt_tokens=100_000))


def test_an_engine_with_room_is_found_among_many_that_have_none():
    fleet = fleet_of(1, 50, total=10, block=16)
    for decode in fleet.decode[1:]:
        decode.promise("x", Job(prompt_tokens=160, output_tokens=0))
    assert fleet.choose(Job(prompt_tokens=100, output_tokens=16)).decode is fleet.decode[0]


def test_a_failing_pair_rests_and_its_engines_do_not():
    clock = Clock()
    fleet = fleet_of(2, 2, clock)
    bad = (fleet.prefill[0], fleet.decode[0])
    assert not fleet.quarantine.failed(bad, "path broken", clock.now)
    assert fleet.quarantine.failed(bad, "path broken", clock.now)
    pairs = {(p.prefill, p.decode) for p in (fleet.choose() for _ in range(100))}
    assert bad not in pairs
    assert {p for p, _ in pairs} == set(fleet.prefill) and {d for _, d in pairs} == set(
        fleet.decode
    )
    (row,) = [row for row in fleet.report()["pairs"] if not row["usable"]]
    assert "quarantined" in row["reasons"][0] and "path broken" in row["reasons"][0]
    assert fleet.usable_pairs() == 3
    clock.now += LONGEST
    again = {fleet.choose_decode(Job(), bad[0]).decode for _ in range(10)}
    assert bad[1] in again


def test_a_fleet_whose_every_pair_rests_still_tries_the_one_that_is_due_first():
    clock = Clock()
    fleet = fleet_of(2, 1, clock)
    first, second = ((p, fleet.decode[0]) for p in fleet.prefill)
    for pair, failures in ((first, 2), (second, 5)):
        for _ in range(failures):
            fleet.quarantine.failed(pair, "x", clock.now)
    assert {fleet.choose().prefill for _ in range(10)} == {fleet.prefill[0]}


def test_rests_double_up_to_a_bound_and_success_ends_them():
    quarantine, pair = Quarantine(), tuple(engines("prefill", 2))
    rests = []
    for _ in range(12):
        quarantine.failed(pair, "x", 0.0)
        rests.append(quarantine.until(pair))
    assert rests[:4] == [0.0, 1.0, 2.0, 4.0] and rests[-1] == LONGEST
    quarantine.worked(pair)
    assert not quarantine and quarantine.until(pair) == 0.0


def test_an_engine_that_leaves_is_not_chosen_and_takes_its_records_along():
    fleet = fleet_of(2, 1)
    gone = fleet.prefill[0]
    fleet.quarantine.failed((gone, fleet.decode[0]), "x", 0.0)
    fleet.remove(gone)
    assert {fleet.choose().prefill for _ in range(10)} == {fleet.prefill[0]}
    assert not fleet.quarantine
    fleet.remove(fleet.prefill[0])
    with pytest.raises(NoPair, match="no prefill engine is known"):
        fleet.choose()


def test_an_engine_that_failed_a_job_is_its_last_resort():
    fleet = fleet_of(2, 1)
    job = Job(excluded=frozenset({fleet.prefill[0], fleet.decode[0]}))
    pairs = [fleet.choose(job) for _ in range(10)]
    assert {p.prefill for p in pairs} == {fleet.prefill[1]}
    assert {p.decode for p in pairs} == {fleet.decode[0]}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"prompt": [1] * 50}, 50),
        ({"prompt": [[1] * 20, [2] * 5]}, 25),
        ({"prompt": "x" * 400}, 100),
    ],
)
def test_prompts_are_measured_without_a_tokenizer(body, tokens):
    assert Job.of(body, 400).prompt_tokens == tokens


def test_equal_beginnings_have_equal_prefixes():
    one, two = ({"messages": [{"role": "system", "content": "x" * 2000 + t}]} for t in "ab")
    assert Job.of(one, 1).prefix == Job.of(two, 1).prefix
    assert Job.of({"prompt": "a"}, 1).prefix != Job.of({"prompt": "b"}, 1).prefix
