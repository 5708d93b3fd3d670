"""Prompts prefilled by one real engine and decoded by another, token for token."""

from __future__ import annotations

import asyncio

import pytest

from tests.e2e.fleet import BLOCK, Fleet, prompt

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]


@pytest.mark.parametrize("tokens", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 250, 256, 1000, 2000])
async def test_a_prompt_of_any_length_is_exact(fleet: Fleet, tokens: int) -> None:
    await fleet.pushes_exactly(prompt(tokens, tokens))


@pytest.mark.parametrize("delay", [-0.5, 0.5])
async def test_either_leg_may_come_first(fleet: Fleet, delay: float) -> None:
    await fleet.pushes_exactly(prompt(600, 7 + int(delay > 0)), delay=delay)


async def test_legs_pair_by_request_id_when_the_proxy_sends_no_transfer_id(fleet: Fleet) -> None:
    await fleet.pushes_exactly(prompt(300, 11), transfer="", request="a-client-id")


async def test_two_prompts_under_one_request_id_never_mix(fleet: Fleet) -> None:
    first, second = prompt(300, 21), prompt(300, 22)
    (_, one), (_, two) = await asyncio.gather(
        fleet.push(first, transfer="", request="twice", delay=-0.1),
        fleet.push(second, transfer="", request="twice", delay=0.1),
    )
    for answer, asked in ((one, first), (two, second)):
        assert not answer.ok or answer.text == await fleet.reference(asked)
    await fleet.settles()


async def test_a_prefix_known_on_prefill_only_is_exact(fleet: Fleet) -> None:
    shared = prompt(400, 31)
    assert (await fleet.post(fleet.prefill, shared, tokens=1)).ok
    await fleet.pushes_exactly(shared + prompt(100, 32))


async def test_a_prefix_known_on_decode_only_is_exact(fleet: Fleet) -> None:
    shared = prompt(400, 41)
    assert (await fleet.post(fleet.decode, shared, tokens=1)).ok
    before = await fleet.metric(fleet.prefill, "neuron_push_bytes_total")
    await fleet.pushes_exactly(shared + prompt(100, 42))
    moved = await fleet.metric(fleet.prefill, "neuron_push_bytes_total") - before
    whole = await fleet.metric(fleet.prefill, "neuron_push_bytes_total")
    assert 0 < moved < whole


async def test_a_prompt_known_on_decode_lets_prefill_go_at_once(fleet: Fleet) -> None:
    known = prompt(10 * BLOCK, 51)
    await fleet.pushes_exactly(known)
    await fleet.pushes_exactly([*known])
    await fleet.settles(within=5.0)  # shorter than the lease


async def test_many_prompts_at_once_are_exact_and_give_everything_back(fleet: Fleet) -> None:
    prompts = [prompt(120 + 37 * number, 100 + number) for number in range(24)]
    await asyncio.gather(*(fleet.pushes_exactly(each) for each in prompts))
    await fleet.settles()
