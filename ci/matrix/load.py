"""Requests through a pair of engines, as a push or pull router sends them."""

from __future__ import annotations

import asyncio
import itertools
import random
import uuid
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp

from neuron_push.processes import HOST

PATIENCE = 60.0
# Token ids of printable ASCII, which every vocabulary here has.
ALPHABET = range(33, 126)


class Place(Protocol):
    """An engine that serves."""

    @property
    def name(self) -> str:
        """Its engine id."""

    @property
    def url(self) -> str: ...
    @property
    def host(self) -> str:
        """Where its side channel listens."""

    @property
    def side_port(self) -> int: ...
    @property
    def tp(self) -> int: ...
    @property
    def served(self) -> str:
        """The model's name."""


@dataclass
class Request:
    """One prompt and what came back."""

    prompt: list[int]
    count: int
    give_up_after: float | None = None
    answer: list[int] | None = None
    error: str = ""


@dataclass
class Batch:
    """Requests that run at most `at_once` at a time."""

    requests: list[Request] = field(default_factory=list)
    at_once: int = 8


def batches(kind: str, block: int, seed: str) -> list[Batch]:
    """The load of that kind; the same for the same seed."""
    dice = random.Random(f"{kind} {seed}")

    def prompt(length: int) -> list[int]:
        return [dice.choice(ALPHABET) for _ in range(length)]

    if kind == "shapes":
        # Around a block's edge, one chunk, several chunks.
        lengths = (2, block - 1, block, block + 1, 3 * block, 300, 512, 513, 1700)
        return [Batch([Request(prompt(length), 12) for length in lengths], 3)]
    if kind == "burst":
        some = [Request(prompt(dice.choice((40, 200, 700, 1500))), 20) for _ in range(24)]
        return [Batch(some, 12)]
    if kind == "prefix":
        # Each round repeats what the one before has put into both prefix caches, and goes on.
        base = prompt(1400)
        rounds = (base[:300], base[:900], base[:900] + prompt(70), base, base[:650])
        again = [Batch([Request(list(tokens), 12) for _ in range(2)], 2) for tokens in rounds]
        return [*again, Batch([Request(base[:1000] + prompt(50), 12) for _ in range(8)], 8)]
    assert kind == "aborts", kind
    storm = [Request(prompt(dice.choice((30, 400, 1300))), 16) for _ in range(200)]
    for request in storm:
        if dice.random() < 0.8:
            request.give_up_after = dice.random() * 0.3
    return [Batch(storm, 32)]


async def run(kind_batches: list[Batch], prefill: Place, decode: Place, mode: str) -> None:
    """Send everything; answers and errors are left in the requests."""
    limits = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=PATIENCE)
    async with aiohttp.ClientSession(connector=limits, timeout=timeout) as session:
        for batch in kind_batches:
            gate = asyncio.Semaphore(batch.at_once)

            async def one(request: Request, gate: asyncio.Semaphore = gate) -> None:
                async with gate:
                    await _one(session, request, prefill, decode, mode)

            await asyncio.gather(*(one(request) for request in batch.requests))


async def alone(place: Place, request: Request) -> None:
    """One engine by itself answers."""
    async with aiohttp.ClientSession() as session:
        request.answer = await _ask(session, place, request, None, "")


async def _one(
    session: aiohttp.ClientSession, request: Request, prefill: Place, decode: Place, mode: str
) -> None:
    legs = _push if mode == "push" else _pull
    try:
        async with asyncio.timeout(request.give_up_after):
            request.answer = await legs(session, request, prefill, decode)
    except TimeoutError:
        request.error = "gave up" if request.give_up_after else f"no answer in {PATIENCE:.0f} s"
    except (aiohttp.ClientError, _Refused) as error:
        request.error = f"{type(error).__name__}: {error}"


class _Refused(Exception):
    """An engine answered with an error."""


async def _push(
    session: aiohttp.ClientSession, request: Request, prefill: Place, decode: Place
) -> list[int]:
    """Both legs at once. A failure of one ends the other."""
    name, transfer = uuid.uuid4().hex, uuid.uuid4().hex
    first: dict[str, Any] = {
        "do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer,
    }  # fmt: skip
    second = {
        "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": prefill.name,
        "remote_host": prefill.host, "remote_port": prefill.side_port, "tp_size": prefill.tp,
        "pp_size": 1, "remote_request_id": name, "transfer_id": transfer,
    }  # fmt: skip
    short = Request(request.prompt, 1)
    async with asyncio.TaskGroup() as group:
        group.create_task(_quiet(_ask(session, prefill, short, first, name)))
        answer = group.create_task(_quiet(_ask(session, decode, request, second, name)))
    found: list[int] | Exception = answer.result()
    if isinstance(found, Exception):
        raise found
    return found


async def _quiet(asking: Any) -> Any:
    """Errors as values: the decode leg's answer is what counts."""
    try:
        return await asking
    except (aiohttp.ClientError, _Refused) as error:
        return error


async def _pull(
    session: aiohttp.ClientSession, request: Request, prefill: Place, decode: Place
) -> list[int]:
    """Prefill first; its answer says where the KV is."""
    name = uuid.uuid4().hex
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    body = await _post(session, prefill, Request(request.prompt, 1), params, name)
    return await _ask(session, decode, request, body["kv_transfer_params"], name)


async def _ask(
    session: aiohttp.ClientSession, place: Place, request: Request,
    params: dict[str, Any] | None, name: str,
) -> list[int]:  # fmt: skip
    body = await _post(session, place, request, params, name)
    return list(body["choices"][0]["token_ids"])


async def _post(
    session: aiohttp.ClientSession, place: Place, request: Request,
    params: dict[str, Any] | None, name: str,
) -> dict[str, Any]:  # fmt: skip
    body: dict[str, Any] = {
        "model": place.served, "prompt": request.prompt, "max_tokens": request.count,
        "temperature": 0, "ignore_eos": True, "return_token_ids": True,
    }  # fmt: skip
    if params is not None:
        body["kv_transfer_params"] = params
    headers = {"X-Request-Id": name} if name else {}
    async with session.post(f"{place.url}/v1/completions", json=body, headers=headers) as answer:
        if answer.status != 200:
            raise _Refused(f"{place.name}: {answer.status} {(await answer.text())[:300]}")
        found = await answer.json()
    if found["choices"][0]["finish_reason"] != "length":
        raise _Refused(f"{place.name}: ended by {found['choices'][0]['finish_reason']}")
    return dict(found)


def flat(kind_batches: list[Batch]) -> list[Request]:
    """All requests of some batches."""
    return list(itertools.chain.from_iterable(batch.requests for batch in kind_batches))


__all__ = ["HOST", "Batch", "Place", "Request", "alone", "batches", "flat", "run"]
