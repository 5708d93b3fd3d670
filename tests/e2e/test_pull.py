"""Pull: decode READs a finished prompt, through proxies written for vLLM's pull connector."""

from __future__ import annotations

import asyncio
import uuid

import pytest

from tests.e2e.fleet import OUTPUT, Answer, Fleet, prompt

pytestmark = [pytest.mark.engines, pytest.mark.slow, pytest.mark.timeout(900)]

# What such proxies send to the prefill engine.
PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
    "remote_block_ids": None, "remote_host": None, "remote_port": None,
}  # fmt: skip


async def first_leg(fleet: Fleet, tokens: list[int], request: str) -> dict[str, object]:
    """Prefill a prompt; what its answer says about the KV."""
    answer = await fleet.post(fleet.prefill, tokens, tokens=1, request=request, params=PREFILL)
    assert answer.ok, answer
    params: dict[str, object] = answer.body["kv_transfer_params"]
    return params


async def sequential(fleet: Fleet, tokens: list[int], **more: object) -> Answer:
    """Prefill first; then decode, with whatever the prefill engine answered."""
    request = uuid.uuid4().hex
    params = {**await first_leg(fleet, tokens, request), **more}
    return await fleet.post(fleet.decode, tokens, request=request, params=params)


async def lent(fleet: Fleet) -> float:
    return await fleet.metric(fleet.prefill, "neuron_push_sends_total", outcome="lent")


async def sent_bytes(fleet: Fleet) -> float:
    return await fleet.metric(fleet.prefill, "neuron_push_bytes_total")


async def test_a_prefill_engine_answers_as_vllms_own_does(fleet: Fleet) -> None:
    tokens = prompt(100, 1)
    params = await first_leg(fleet, tokens, "as-vllm")
    assert params["do_remote_prefill"] is True and params["do_remote_decode"] is False
    (ids,) = params["remote_block_ids"]  # type: ignore[misc]
    assert len(ids) >= 4 and all(isinstance(block, int) for block in ids)
    assert params["remote_request_id"] and params["remote_engine_id"]
    assert params["remote_port"] == fleet.prefill.side_port and params["tp_size"] == 1
    answer = await fleet.post(fleet.decode, tokens, request="as-vllm", params=params)
    assert answer.text == await fleet.reference(tokens)


@pytest.mark.parametrize("length", [2, 31, 32, 33, 700])
async def test_a_prompt_read_there_continues_as_one_engine_would(fleet: Fleet, length: int) -> None:
    tokens, before, written = (
        prompt(length, 1000 + length),
        await lent(fleet),
        await sent_bytes(fleet),
    )
    answer = await sequential(fleet, tokens)
    assert answer.ok, answer
    assert answer.text == await fleet.reference(tokens)
    assert await lent(fleet) == before + 1
    assert await sent_bytes(fleet) == written, "nothing was pushed"


async def test_only_what_decode_lacks_is_read(fleet: Fleet) -> None:
    tokens = prompt(320, 7)
    await sequential(fleet, tokens)
    longer = [*tokens, *prompt(100, 8)]
    before = await fleet.metric(fleet.decode, "neuron_push_received_bytes_total")
    answer = await sequential(fleet, longer)
    read = await fleet.metric(fleet.decode, "neuron_push_received_bytes_total") - before
    await sequential(fleet, prompt(420, 9))
    whole = await fleet.metric(fleet.decode, "neuron_push_received_bytes_total") - before - read
    assert answer.text == await fleet.reference(longer)
    assert 0 < read < 0.5 * whole


async def test_forged_block_ids_read_nobody_elses_prompt(fleet: Fleet) -> None:
    tokens = prompt(200, 11)
    answer = await sequential(fleet, tokens, remote_block_ids=[[1, 1, 1, 1, 1, 1, 1]])
    assert answer.text == await fleet.reference(tokens)


async def test_many_at_once_and_pushes_between_them(fleet: Fleet) -> None:
    prompts = [prompt(150 + 40 * index, 20 + index) for index in range(8)]
    answers = await asyncio.gather(
        *(
            sequential(fleet, tokens) if index % 2 else fleet.push(tokens)
            for index, tokens in enumerate(prompts)
        )
    )
    for tokens, answer in zip(prompts, answers, strict=True):
        found = answer if isinstance(answer, Answer) else answer[1]
        assert found.ok, found
        assert found.text == await fleet.reference(tokens, OUTPUT)
    await fleet.settles()


async def test_a_prompt_that_is_not_there_fails_in_time_and_gives_everything_back(
    fleet: Fleet,
) -> None:
    tokens = prompt(90, 40)
    params = await first_leg(fleet, tokens, "gone")
    params["deadline_ms"] = 1000
    other = prompt(90, 41)
    answer = await fleet.post(fleet.decode, other, request="gone", params=params)
    assert not answer.ok and answer.seconds < 10, answer
    await fleet.settles()  # the prompt that nobody fetched, too, when its lease ends
