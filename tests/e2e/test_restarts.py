"""Engines that die, hang and come back on the same ports. Runs last: it restarts the fleet."""

from __future__ import annotations

import asyncio
import time

import pytest

from neuron_push.engines import Engine
from tests.e2e.fleet import Fleet, prompt

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(400)]


async def _restart(engine: Engine) -> None:
    engine.kill()
    await asyncio.to_thread(lambda: engine.start().wait_ready())


async def _dies(fleet: Fleet, victim: Engine, other: Engine) -> None:
    """Kill an engine while long prompts travel; the other's requests end and it gives all back."""
    asked = [prompt(2500, 3000 + number) for number in range(2)]
    legs = [asyncio.create_task(fleet.push(each, tokens=200)) for each in asked]
    await asyncio.sleep(0.4)
    victim.kill()
    killed = time.monotonic()
    await asyncio.gather(*legs)
    assert time.monotonic() - killed < 20
    until = time.monotonic() + 10
    while time.monotonic() < until:
        if not await fleet.metric(other, "neuron_push_pinned_blocks") and not await fleet.metric(
            other, "vllm:kv_cache_usage_perc"
        ):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(f"{other.name} holds KV after {victim.name} died")


async def test_a_killed_prefill_engine_ends_requests_and_returns_on_its_port(
    fleet: Fleet,
) -> None:
    await fleet.pushes_exactly(prompt(100, 3100))
    await _dies(fleet, fleet.prefill, fleet.decode)
    await asyncio.to_thread(lambda: fleet.prefill.start().wait_ready())
    await fleet.pushes_exactly(prompt(300, 3101))
    await fleet.settles()


async def test_a_killed_decode_engine_frees_prefill_and_returns_on_its_port(fleet: Fleet) -> None:
    await fleet.pushes_exactly(prompt(100, 3200))
    await _dies(fleet, fleet.decode, fleet.prefill)
    await asyncio.to_thread(lambda: fleet.decode.start().wait_ready())
    await fleet.pushes_exactly(prompt(300, 3201))
    await fleet.settles()


async def test_a_prefill_engine_that_hangs_is_given_up_and_taken_back(fleet: Fleet) -> None:
    await fleet.pushes_exactly(prompt(100, 3300))
    asked = prompt(1500, 3301)
    fleet.prefill.pause()
    try:
        answer = await fleet.post(fleet.decode, asked, params=fleet.decode_params("hung"))
        assert answer.status >= 400 and answer.seconds < 9, answer
    finally:
        fleet.prefill.resume()
    await fleet.pushes_exactly(asked)
    await fleet.settles()
