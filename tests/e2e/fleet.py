"""A prefill and a decode engine on loopback, and what tests ask of them."""

from __future__ import annotations

import asyncio
import random
import re
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from neuron_push.engines import Engine

MODEL = "tiny"
BLOCK = 32
OUTPUT = 8


@dataclass
class Answer:
    """What an engine answered to one leg."""

    status: int
    body: dict[str, Any]
    seconds: float

    @property
    def text(self) -> str:
        return str(self.body["choices"][0]["text"])

    @property
    def finish(self) -> str:
        return str(self.body["choices"][0]["finish_reason"])

    @property
    def ok(self) -> bool:
        return self.status == 200 and "choices" in self.body


@dataclass
class Fleet:
    """The two engines and a client."""

    prefill: Engine
    decode: Engine
    references: dict[tuple[int, ...], str] = field(default_factory=dict)

    async def post(
        self,
        engine: Engine,
        prompt: list[int],
        *,
        tokens: int = OUTPUT,
        params: dict[str, Any] | None = None,
        request: str = "",
        timeout: float = 60,  # noqa: ASYNC109  the client's patience, part of what is tested
    ) -> Answer:
        """One completion request; a broken connection is status 0."""
        body: dict[str, Any] = {
            "model": MODEL, "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        if params is not None:
            body["kv_transfer_params"] = params
        headers = {"X-Request-Id": request} if request else {}
        began = time.monotonic()
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout)) as session,
                session.post(
                    f"{engine.url}/v1/completions", json=body, headers=headers
                ) as response,
            ):
                answer = await response.json(content_type=None)
                return Answer(response.status, answer, time.monotonic() - began)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            return Answer(0, {"error": repr(error)}, time.monotonic() - began)

    def prefill_params(self, transfer: str = "") -> dict[str, Any]:
        """What a push proxy sends to the prefill engine."""
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        return {**params, "transfer_id": transfer} if transfer else params

    def decode_params(self, transfer: str = "", **more: Any) -> dict[str, Any]:
        """What a push proxy sends to the decode engine."""
        params: dict[str, Any] = {
            "do_remote_decode": False, "do_remote_prefill": True,
            "remote_host": "127.0.0.1", "remote_port": self.prefill.side_port,
        }  # fmt: skip
        if transfer:
            params["transfer_id"] = transfer
        return {**params, **more}

    async def push(
        self, prompt: list[int], *, tokens: int = OUTPUT, transfer: str | None = None,
        request: str = "", delay: float = 0.0, **more: Any,
    ) -> tuple[Answer, Answer]:  # fmt: skip
        """Both legs of one request: (prefill's answer, decode's).

        `delay` seconds pass between the legs; negative: decode first.
        """
        transfer = uuid.uuid4().hex if transfer is None else transfer
        request = request or uuid.uuid4().hex

        async def leg(wait: float, call: Callable[[], Awaitable[Answer]]) -> Answer:
            await asyncio.sleep(max(0.0, wait))
            return await call()

        return await asyncio.gather(
            leg(-delay, lambda: self.post(
                self.prefill, prompt, tokens=1, request=request,
                params=self.prefill_params(transfer),
            )),
            leg(delay, lambda: self.post(
                self.decode, prompt, tokens=tokens, request=request,
                params=self.decode_params(transfer, **more),
            )),
        )  # fmt: skip

    async def reference(self, prompt: list[int], tokens: int = OUTPUT) -> str:
        """What one engine alone answers."""
        key = (tokens, *prompt)
        if key not in self.references:
            answer = await self.post(self.prefill, prompt, tokens=tokens)
            assert answer.ok, answer
            self.references[key] = answer.text
        return self.references[key]

    async def pushes_exactly(self, prompt: list[int], **more: Any) -> None:
        """A prompt prefilled there and decoded here reads as one engine alone answers."""
        _, answer = await self.push(prompt, **more)
        assert answer.ok, answer
        assert answer.text == await self.reference(prompt, more.get("tokens", OUTPUT))

    async def metric(self, engine: Engine, name: str, **labels: str) -> float:
        """Sum of an engine's metric over the series that carry these labels."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{engine.url}/metrics") as response,
        ):
            text = await response.text()
        total = 0.0
        for found in re.finditer(rf"^{re.escape(name)}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE):
            if all(f'{key}="{value}"' in (found[1] or "") for key, value in labels.items()):
                total += float(found[2])
        return total

    async def settles(self, within: float = 15.0) -> None:
        """Both engines give every KV block back: nothing leaked."""
        until = time.monotonic() + within
        used: dict[str, tuple[float, float]] = {}
        while time.monotonic() < until:
            used = {
                engine.name: (
                    await self.metric(engine, "vllm:kv_cache_usage_perc"),
                    await self.metric(engine, "neuron_push_pinned_blocks"),
                )
                for engine in (self.prefill, self.decode)
            }
            if not any(any(pair) for pair in used.values()):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"KV (usage, pinned blocks) still in use after {within} s: {used}")


def prompt(tokens: int, seed: int) -> list[int]:
    """Random token ids that the tiny tokenizer knows."""
    source = random.Random(seed)
    return [source.randrange(3, 250) for _ in range(tokens)]
