"""Scatters engines' free blocks, as hours of mixed traffic do.

vLLM hands out the block that came free last. So answers are made to grow beside each other until
they hold the whole pool: each takes every n-th block, and gives them back in that order. Short
requests would only stir the few blocks on top.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

import aiohttp

from neuron_push.emulation.fleet import SERVED, EmulatedEngine
from neuron_push.errors import NeuronPushError

PATIENCE: Final = 600.0


def churn(engines: Sequence[EmulatedEngine]) -> None:
    """Leave no two neighbours beside each other in the free lists of these engines."""
    asyncio.run(_all(engines))


async def _all(engines: Sequence[EmulatedEngine]) -> None:
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with (
        aiohttp.ClientSession(connector=limits, timeout=timeout) as session,
        asyncio.TaskGroup() as group,
    ):
        for engine in engines:
            spec = engine.spec
            for prompt, count in answers(spec.blocks, engine.block_size, spec.max_seqs):
                group.create_task(_one(session, engine.url, prompt, count))


def answers(blocks: int, size: int, at_once: int) -> list[tuple[int, int]]:
    """Prompt and answer, in tokens, of requests that fill a pool together.

    Prompts differ in length, so that block boundaries come in turn. Block 0 is nobody's, and one
    block per request is left over: none is preempted.
    """
    each = (blocks - 1) // at_once - 1
    if each < 2:
        raise NeuronPushError(f"{blocks} blocks are too few for {at_once} requests at once")
    return [
        (prompt, each * size - prompt - 1)
        for prompt in (1 + index * (size - 1) // at_once for index in range(at_once))
    ]


async def _one(session: aiohttp.ClientSession, url: str, prompt: int, count: int) -> None:
    body = {
        "model": SERVED, "prompt": [33 + index % 90 for index in range(prompt)],
        "max_tokens": count, "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise NeuronPushError(f"{url} answered {answer.status}: {await answer.text()}")
        await answer.read()
