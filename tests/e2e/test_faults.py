"""Bad input and faults: every request ends, every block comes back, both engines serve on."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from neuron_push.errors import TransportError
from neuron_push.ports import free_ports
from neuron_push.protocol import VERSION, Address, EngineInfo, Who, encode
from neuron_push.sidechannel import ask, ask_async
from tests.e2e.fleet import BLOCK, Fleet, prompt

HEADER = b"NP" + bytes([VERSION])

pytestmark = [pytest.mark.engines, pytest.mark.timeout(300)]
PREEMPTIONS = "vllm:num_preemptions_total"

# What is wrong, and what the answer must say of it.
BAD_PARAMS: list[tuple[dict[str, Any], str]] = [
    ({"remote_host": None}, "remote_host is missing"),
    ({"remote_host": 17}, "remote_host is 17"),
    ({"remote_port": None}, "remote_port is missing"),
    ({"remote_port": "many"}, "remote_port is 'many'"),
    ({"remote_port": 70_000}, "remote_port is 70000"),
    ({"remote_port": -1}, "remote_port is -1"),
    ({"do_remote_decode": True}, "both set"),
    ({"do_remote_prefill": "yes"}, "do_remote_prefill is 'yes'"),
    ({"transfer_id": ["a"]}, "transfer_id is ['a']"),
    ({"transfer_id": "x" * 10_000}, "transfer_id is"),
    ({"remote_engine_id": "somebody-else"}, "not somebody-else"),
    ({"deadline_ms": "soon"}, "deadline_ms is 'soon'"),
]


@pytest.mark.parametrize(("change", "words"), BAD_PARAMS, ids=[w for _, w in BAD_PARAMS])
async def test_bad_parameters_fail_that_request_only(
    fleet: Fleet, change: dict[str, Any], words: str
) -> None:
    asked = prompt(200, 1001)
    answer = await fleet.post(
        fleet.decode, asked, params={**fleet.decode_params("bad"), **change}, timeout=20
    )
    assert not answer.ok and answer.status >= 400, answer
    assert words in answer.body["error"]["message"]
    await fleet.pushes_exactly(prompt(70, 1002))


async def test_a_prefill_leg_at_a_decode_engine_is_refused(fleet: Fleet) -> None:
    answer = await fleet.post(
        fleet.decode, prompt(200, 1003), params=fleet.prefill_params("wrong"), timeout=20
    )
    assert answer.status >= 400
    answer = await fleet.post(
        fleet.prefill, prompt(200, 1004), params=fleet.decode_params("wrong"), timeout=20
    )
    assert answer.status >= 400
    await fleet.settles()


@pytest.mark.parametrize("target", ["nobody", "http", "decode"])
async def test_a_wrong_side_channel_address_ends_the_request(fleet: Fleet, target: str) -> None:
    port = {
        "nobody": free_ports(1)[0], "http": fleet.prefill.port, "decode": fleet.decode.side_port,
    }[target]  # fmt: skip
    answer = await fleet.post(
        fleet.decode, prompt(200, 1005), params=fleet.decode_params("lost", remote_port=port),
        timeout=20,
    )  # fmt: skip
    assert answer.status >= 400 and answer.seconds < 8, answer
    await fleet.settles()


async def test_a_decode_leg_without_prefill_ends_within_its_budget(fleet: Fleet) -> None:
    answer = await fleet.post(
        fleet.decode, prompt(500, 1011), params=fleet.decode_params("alone", deadline_ms=1500)
    )
    assert answer.status == 502 and 1.0 < answer.seconds < 4.0, answer
    assert "no KV within 1.5 s" in answer.body["error"]["message"]
    await fleet.settles()


async def test_a_prefill_leg_without_decode_is_let_go_after_its_lease(fleet: Fleet) -> None:
    asked = prompt(500, 1021)
    assert (
        await fleet.post(fleet.prefill, asked, tokens=1, params=fleet.prefill_params("alone2"))
    ).ok
    assert await fleet.metric(fleet.prefill, "neuron_push_pinned_blocks") > 0
    await fleet.settles(within=12.0)
    answer = await fleet.post(fleet.decode, asked, params=fleet.decode_params("alone2"))
    assert answer.status >= 400 and answer.seconds < 2.0, answer  # told, not timed out


async def test_an_aborted_prefill_leg_ends_the_decode_leg(fleet: Fleet) -> None:
    asked = prompt(3000, 1031)
    decode = asyncio.create_task(
        fleet.post(fleet.decode, asked, params=fleet.decode_params("gone"), timeout=30)
    )
    prefill = await fleet.post(
        fleet.prefill, asked, tokens=1, params=fleet.prefill_params("gone"), timeout=0.15
    )
    answer = await decode
    # A prompt that was complete before its client left is handed over all the same.
    assert answer.status >= 400 or answer.text == await fleet.reference(asked), (prefill, answer)
    assert answer.seconds < 8
    await fleet.settles()


@pytest.mark.parametrize("patience", [0.02, 0.1, 0.3, 0.6])
async def test_a_client_that_leaves_costs_nothing(fleet: Fleet, patience: float) -> None:
    asked = [prompt(1500, 1041 + number) for number in range(3)]

    async def leave(number: int) -> None:
        transfer = f"left-{patience}-{number}"
        await asyncio.gather(
            fleet.post(fleet.prefill, asked[number], tokens=1, timeout=patience,
                       params=fleet.prefill_params(transfer)),
            fleet.post(fleet.decode, asked[number], tokens=64, timeout=patience,
                       params=fleet.decode_params(transfer)),
        )  # fmt: skip

    await asyncio.gather(*(leave(number) for number in range(3)))
    await fleet.settles()
    await fleet.pushes_exactly(asked[0])


@pytest.mark.fire
async def test_an_abort_storm_corrupts_and_leaks_nothing(fleet: Fleet) -> None:
    source = random.Random(5)
    wrong: list[Any] = []

    async def one(number: int) -> None:
        await asyncio.sleep(number * 0.04)
        asked = prompt(source.randrange(40, 900), 2000 + number)
        expected = await fleet.reference(asked)
        transfer = f"storm-{number}"
        timeout = source.uniform(0.01, 0.5) if number % 2 else 60
        _, answer = await asyncio.gather(
            fleet.post(fleet.prefill, asked, tokens=1, timeout=60 if number % 4 else timeout,
                       params=fleet.prefill_params(transfer)),
            fleet.post(fleet.decode, asked, timeout=timeout,
                       params=fleet.decode_params(transfer, deadline_ms=8000)),
        )  # fmt: skip
        if answer.ok and answer.text != expected:
            wrong.append((number, answer.text, expected))

    await asyncio.gather(*(one(number) for number in range(60)))
    assert not wrong
    await fleet.settles(within=20)


@pytest.mark.fire
async def test_both_legs_sent_again_under_the_same_ids_never_mix(fleet: Fleet) -> None:
    """As routers do it that know one name for a request, and forget its first prefill leg."""

    async def one(number: int) -> None:
        asked = prompt(1000 + 50 * number, 2100 + number)
        name = f"same-{number}"
        prefill, decode = fleet.prefill_params(name), fleet.decode_params(name, deadline_ms=6000)
        forgotten = asyncio.create_task(
            fleet.post(fleet.prefill, asked, tokens=1, request=name, params=prefill)
        )
        await fleet.post(
            fleet.decode, asked, request=name, params=decode, timeout=0.05 + 0.12 * number
        )
        _, answer = await asyncio.gather(
            fleet.post(fleet.prefill, asked, tokens=1, request=name, params=prefill),
            fleet.post(fleet.decode, asked, request=name, params=decode),
        )
        await forgotten
        # It may have met the first prefill leg: of one that is over, decode hears that it is.
        assert answer.seconds < 15, answer
        if answer.ok:
            assert answer.text == await fleet.reference(asked)
        else:
            assert "KV transfer failed: " in answer.body["error"]["message"], answer
        await fleet.pushes_exactly(asked)

    await asyncio.gather(*(one(number) for number in range(4)))
    await fleet.settles()


async def test_a_prompt_longer_than_the_kv_cache_is_an_error(fleet: Fleet) -> None:
    asked = prompt(5000, 1061)
    answer = await fleet.post(fleet.decode, asked, params=fleet.decode_params("long"))
    assert answer.status == 400
    await fleet.pushes_exactly(prompt(50, 1062))


@pytest.mark.fire
async def test_more_prompts_than_the_kv_cache_holds_all_end_exactly(fleet: Fleet) -> None:
    prompts = [prompt(2000, 1070 + number) for number in range(7)]
    await asyncio.gather(*(fleet.pushes_exactly(each, tokens=48) for each in prompts))
    await fleet.settles()


@pytest.mark.fire
async def test_prompts_that_decode_and_prefill_preempt_are_exact(fleet: Fleet) -> None:
    before = {
        engine.name: await fleet.metric(engine, PREEMPTIONS)
        for engine in (fleet.prefill, fleet.decode)
    }
    # Each engine's own prompts and the pushed ones find room among its 200 blocks, and outgrow it.
    own = [prompt(14 * BLOCK - 10, 1320 + number) for number in range(12)]
    alone = asyncio.gather(
        *(fleet.post(fleet.prefill, each, tokens=110) for each in own),
        *(fleet.post(fleet.decode, each, tokens=200) for each in own),
    )
    prompts = [prompt(12 * BLOCK - 10, 1300 + number) for number in range(6)]
    answers = await asyncio.gather(*(fleet.push(each, tokens=200) for each in prompts))
    assert all(answer.ok for answer in await alone)
    for asked, (_, answer) in zip(prompts, answers, strict=True):
        assert answer.ok and answer.text == await fleet.reference(asked, 200), answer
    for engine in (fleet.prefill, fleet.decode):
        preempted = await fleet.metric(engine, PREEMPTIONS) - before[engine.name]
        print(f"{engine.name} preempted {preempted:.0f} times")
        assert preempted > 0, engine.name
    await fleet.settles()


@pytest.mark.parametrize(
    "frame", [b"", b"GET / HTTP/1.1\r\n\r\n", b"NP\x63" + encode(Who())[3:], HEADER + b"\xc1\xff",
              HEADER + bytes(100_000)],
    ids=["empty", "http", "old-version", "malformed", "noise"],
)  # fmt: skip
async def test_garbage_on_the_side_channel_is_refused(fleet: Fleet, frame: bytes) -> None:
    import zmq
    import zmq.asyncio

    context = zmq.asyncio.Context()
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://127.0.0.1:{fleet.prefill.side_port}")
        await dealer.send(frame)
        answer = await asyncio.wait_for(dealer.recv(), 5)
        assert b"Refusal" in answer
    finally:
        context.destroy(linger=0)
    await fleet.pushes_exactly(prompt(40, 1080))


async def test_an_engine_says_who_it_is(fleet: Fleet) -> None:
    info = await ask_async(Address("127.0.0.1", fleet.prefill.side_port), Who(), 5.0)
    assert isinstance(info, EngineInfo)
    assert (info.role, info.world, len(info.ranks), info.modes[:1]) == ("producer", 1, 1, ("push",))
    assert info.total_blocks == 200 and 0 < info.free_blocks <= 200


def test_a_dead_port_is_an_error_that_names_it() -> None:
    port = free_ports(1)[0]
    with pytest.raises(TransportError, match=str(port)):
        ask(Address("127.0.0.1", port), Who(), 1.0)
