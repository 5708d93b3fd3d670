"""Prompts, and a client that sends them and notes what comes back when."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
import msgspec

from neuron_push.processes import Progress

# Printable ASCII: with one token per byte, as many tokens as characters.
ALPHABET: Final = [chr(code) for code in range(0x20, 0x7F)]
# For one whole request; the demo's take well under a second each.
TIMEOUT: Final = 300.0
# Longest line of an answer; the first one repeats the prompt's token ids.
LONGEST_LINE: Final = 8 << 20


@dataclass(frozen=True)
class Reply:
    """What one request brought. Times are seconds; `error` is empty when it was answered."""

    tokens: tuple[int, ...] = ()
    first_token: float = 0.0
    last_token: float = 0.0
    prompt_tokens: int = 0
    error: str = ""

    @property
    def per_token(self) -> float | None:
        """Mean time per output token after the first; None when there is only one."""
        if len(self.tokens) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self.tokens) - 1)


class BadReply(Exception):
    """The server answered an error, or something that is no completion stream."""


def random_prompts(count: int, tokens: int, seed: int) -> list[str]:
    """Distinct prompts without a common beginning worth caching."""
    choose = random.Random(seed)
    return ["".join(choose.choices(ALPHABET, k=tokens)) for _ in range(count)]


async def complete_all(
    url: str, model: str, prompts: Sequence[str], output: int, concurrency: int, progress: Progress
) -> list[Reply]:
    """Complete every prompt greedily, at most `concurrency` at a time; replies in order."""
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def one(session: aiohttp.ClientSession, prompt: str) -> Reply:
        nonlocal done
        async with gate:
            reply = await complete(session, url, model, prompt, output)
        done += 1
        if done % 8 == 0 or done == len(prompts):
            progress(f"{done} of {len(prompts)} answered")
        return reply

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=TIMEOUT)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=LONGEST_LINE
    ) as session:
        return await asyncio.gather(*(one(session, prompt) for prompt in prompts))


async def complete(
    session: aiohttp.ClientSession, url: str, model: str, prompt: str, output: int
) -> Reply:
    """Complete one prompt greedily; a failure becomes the reply's `error`."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        # Text would not do: different tokens may decode to the same replacement character.
        "return_token_ids": True,
    }
    started = time.monotonic()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise BadReply(f"HTTP {answer.status}: {(await answer.text())[:500]}")
            return await _read(answer.content, started)
    except (aiohttp.ClientError, TimeoutError, OSError, BadReply) as error:
        return Reply(error=str(error) or type(error).__name__)


async def _read(lines: AsyncIterable[bytes], started: float) -> Reply:
    tokens: list[int] = []
    first = last = started
    prompt_tokens = 0
    async for line in lines:
        if not line.startswith(b"data:") or b"[DONE]" in line[:16]:
            continue
        event = _event(line[5:])
        prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", prompt_tokens)
        for choice in event.get("choices", []):
            new = choice.get("token_ids") or []
            if new:
                last = time.monotonic()
                first = first if tokens else last
            tokens += new
    return Reply(tuple(tokens), first - started, last - started, prompt_tokens)


def _event(raw: bytes) -> dict[str, Any]:
    try:
        event = msgspec.json.decode(raw)
    except msgspec.DecodeError as error:
        raise BadReply(f"not an event: {raw[:200]!r} ({error})") from None
    if not isinstance(event, dict) or "error" in event:
        raise BadReply(f"the stream carries an error: {raw[:500].decode(errors='replace')}")
    return event
