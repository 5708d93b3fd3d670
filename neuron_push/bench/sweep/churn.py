"""Scatters an engine's free blocks, as hours of mixed traffic do.

vLLM hands out blocks in the order in which they came free. Many short requests that end in
another order than they began, and whose answers grow block by block beside each other, leave
that order without neighbours.
"""

from __future__ import annotations

import asyncio
import random
from typing import Final

import aiohttp

from neuron_push.emulation.fleet import SERVED, EmulatedEngine
from neuron_push.errors import NeuronPushError

AT_ONCE: Final = 32
SEED: Final = 7


def churn(engine: EmulatedEngine) -> None:
    """Use every block once, in requests of one to three blocks, some kept longer than others."""
    asyncio.run(_churn(engine.url, engine.spec.blocks, engine.block_size))


async def _churn(url: str, blocks: int, size: int) -> None:
    dice = random.Random(SEED)
    gate = asyncio.Semaphore(AT_ONCE)
    limits = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=limits) as session:

        async def one(prompt: list[int], count: int) -> None:
            body = {
                "model": SERVED, "prompt": prompt, "max_tokens": count, "ignore_eos": True,
                "temperature": 0,
            }  # fmt: skip
            async with gate, session.post(f"{url}/v1/completions", json=body) as answer:
                if answer.status != 200:
                    raise NeuronPushError(f"{url} answered {answer.status} to churn")
                await answer.read()

        async with asyncio.TaskGroup() as group:
            used = 0
            while used < blocks:
                count = dice.choice((1, 1, 2, 3))
                used += count
                prompt = [dice.randrange(33, 126) for _ in range(count * size - size // 2)]
                group.create_task(one(prompt, dice.choice((1, 2, 5, size))))
