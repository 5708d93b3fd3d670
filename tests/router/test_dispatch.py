from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from neuron_push.router import dispatch as dispatch_module
from neuron_push.router.fleet import Incast
from neuron_push.router.legs import LegFailed, Limits
from neuron_push.tracing import TraceContext
from tests.router import fleet
from tests.router.fleet import STREAM, error_in, fails, never, routed, until


async def both_calls(routed_fleet):
    """Both legs as their engines received them; a router that waits for one would hang here."""
    return await asyncio.gather(routed_fleet.p.next_call(), routed_fleet.d.next_call())


async def cancelled(call):
    await asyncio.wait_for(call.cancelled.wait(), 10)


async def test_both_legs_leave_at_once_under_one_request_id():
    async with routed() as f:
        f.p.script = f.d.script = never
        task = asyncio.ensure_future(f.post(headers={"X-Request-Id": "mine"}))
        prefill, decode = await both_calls(f)
        assert prefill.headers["X-Request-Id"] == decode.headers["X-Request-Id"] == "mine"
        assert decode.params["remote_request_id"] == "mine"
        task.cancel()


async def test_the_legs_carry_the_parameters_that_engines_expect():
    async with routed() as f:
        f.p.info = fleet.who("P0", tensor_parallel=4, pipeline_parallel=2, data_rank=3)
        await f.router.watch.refresh(f.router.fleet.prefill[0])
        async with f.post() as answer:
            assert answer.status == 200
            assert answer.headers["x-neuron-push-mode"] == "disagg"
        prefill, decode = await both_calls(f)
        transfer = prefill.params["transfer_id"]
        assert prefill.params == {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
            "transfer_mode": "push",
            "transfer_id": transfer,
        }
        assert decode.params == {
            "do_remote_decode": False,
            "do_remote_prefill": True,
            "remote_engine_id": "P0",
            "remote_host": "127.0.0.1",
            "remote_port": f.p.side.port,
            "tp_size": 4,
            "pp_size": 2,
            "remote_request_id": decode.headers["X-Request-Id"],
            "transfer_id": transfer,
        }
        assert prefill.headers["X-data-parallel-rank"] == "3"
        assert "X-data-parallel-rank" not in decode.headers


async def test_every_dispatch_has_a_transfer_id_of_its_own_even_under_one_request_id():
    async with routed() as f:
        for _ in range(3):
            async with f.post(headers={"X-Request-Id": "same"}) as answer:
                assert answer.status == 200
        calls = [await both_calls(f) for _ in range(3)]
        assert all(p.params["transfer_id"] == d.params["transfer_id"] for p, d in calls)
        assert len({p.params["transfer_id"] for p, _ in calls}) == 3


TRACEPARENT = f"00-{'ab' * 16}-{'12' * 8}-01"


@pytest.mark.parametrize("given", [TRACEPARENT, ""])
async def test_a_tracing_router_puts_a_span_between_the_client_and_both_engines(given):
    async with routed(trace_events=64) as f:
        async with f.post(headers={"traceparent": given} if given else {}) as answer:
            assert answer.status == 200
        prefill, decode = await both_calls(f)
        sent = TraceContext.parse(prefill.headers["traceparent"])
        assert prefill.headers["traceparent"] == decode.headers["traceparent"] != given
        (event,) = [e for e in f.router.flights.ring.batch().events if e.name == "trace context"]
        assert event.detail == f"{sent} {given}"
        if given:
            assert sent.trace == "ab" * 16 and sent.span != "12" * 8


async def test_a_router_that_does_not_trace_passes_the_clients_context_on():
    async with routed() as f:
        headers = {"traceparent": TRACEPARENT, "tracestate": "a=b"}
        async with f.post(headers=headers) as answer:
            assert answer.status == 200
        for call in await both_calls(f):
            assert {name: call.headers[name] for name in headers} == headers


async def test_a_second_attempt_has_a_span_of_its_own():
    async with routed(trace_events=64, rules=dispatch_module.Rules(retries=1)) as f:
        f.p.script, f.d.script = fails(500, "broken", "InternalServerError"), never
        async with f.post(headers={"traceparent": TRACEPARENT}) as answer:
            assert answer.status == 502
        events = f.router.flights.ring.batch().events
        (own, above), (second, between) = [
            e.detail.split() for e in events if e.name == "trace context"
        ]
        assert above == TRACEPARENT and between == own and second != own


async def test_what_is_over_the_limit_of_transfers_waits_and_is_served_in_its_turn():
    async with routed(incast=Incast(into=1)) as f:
        f.d.script = fleet.stepwise_stream
        first = asyncio.ensure_future(f.post())
        _, decode = await both_calls(f)
        second = asyncio.ensure_future(f.post())
        await until(lambda: f.router.fleet.report()["decode"][0]["moving"] == 1)
        await until(lambda: f.router.metrics.waiting._value.get() == 1)
        assert f.d.calls.empty()
        decode.proceed(2)  # its first byte: the KV is there
        later = await f.d.next_call()
        for call in (decode, later):
            call.proceed(20)
        for task in (first, second):
            async with await task as answer:
                assert answer.status == 200
                await answer.read()
        await until(lambda: not any(e.moving for e in f.router.fleet.engines))


async def test_parameters_of_the_client_are_dropped():
    async with routed() as f:
        forged = {"do_remote_prefill": True, "remote_host": "198.51.100.1", "x": 1}
        async with f.post({"prompt": "a", "kv_transfer_params": forged}) as answer:
            assert answer.status == 200
        for call in await both_calls(f):
            assert call.params.get("remote_host") != "198.51.100.1"
            assert "x" not in call.params


async def test_only_harmless_headers_travel_on():
    async with routed() as f:
        headers = {"Authorization": "Bearer k", "X-data-parallel-rank": "7", "Cookie": "c=1"}
        async with f.post(headers=headers) as answer:
            assert answer.status == 200
        prefill, decode = await both_calls(f)
        assert prefill.headers["Authorization"] == decode.headers["Authorization"] == "Bearer k"
        assert prefill.headers["X-data-parallel-rank"] == "0"
        assert "Cookie" not in decode.headers


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_a_stream_passes_through_byte_for_byte(path):
    async with routed() as f:
        f.d.script = fleet.answer_stream
        async with f.post({"stream": True}, path) as answer:
            assert answer.content_type == "text/event-stream"
            assert await answer.read() == b"".join(STREAM)
        prefill, decode = await both_calls(f)
        assert prefill.path == decode.path == path
        assert ("max_completion_tokens" in prefill.body) == ("chat" in path)


async def test_pieces_of_a_stream_are_not_held_back():
    async with routed() as f:
        f.d.script = fleet.stepwise_stream
        task = asyncio.ensure_future(f.post({"stream": True}))
        call = await f.d.next_call()
        call.proceed(2)
        answer = await task
        got = await answer.content.readexactly(len(STREAM[0]))
        for piece in STREAM[1:]:
            call.proceed()
            got += await asyncio.wait_for(answer.content.readexactly(len(piece)), 10)
        assert got == b"".join(STREAM)
        answer.release()


async def test_a_failing_prefill_ends_the_decode_leg_and_says_so():
    async with routed() as f:
        f.p.script, f.d.script = fails(500, "out of luck", "InternalServerError"), never
        async with f.post() as answer:
            assert answer.status == 502
            error = error_in(await answer.read())
        assert error["leg"] == "prefill"
        assert error["engine"] == f.p.url
        assert "out of luck" in error["message"] and "prefill-0" in error["message"]
        await cancelled(await f.d.next_call())
        await f.idle()
        assert await f.counts() == {"prefill_failed": 1}


async def test_a_prefill_failure_counts_even_when_the_head_of_a_stream_was_sent_already():
    async with routed() as f:
        f.d.script = fleet.head_only

        async def after_the_decode_leg(call, request):
            await f.router.session.get(f.d.url + "/health")
            return await fails(503, "overloaded")(call, request)

        f.p.script = after_the_decode_leg
        async with f.post({"stream": True}) as answer:
            assert answer.status == 502
            assert "overloaded" in error_in(await answer.read())["message"]
        await cancelled(await f.d.next_call())


async def test_a_request_that_prefill_refuses_is_refused_in_its_own_words():
    async with routed() as f:
        f.p.script, f.d.script = fails(400, "prompt too long"), never
        async with f.post() as answer:
            assert answer.status == 400
            assert error_in(await answer.read())["message"] == "prompt too long"
        await cancelled(await f.d.next_call())


async def test_a_prefill_that_was_aborted_is_a_failure():
    async def aborted(call, request):
        return aiohttp.web.json_response({"choices": [{"finish_reason": "abort"}]})

    async with routed() as f:
        f.p.script, f.d.script = aborted, never
        async with f.post() as answer:
            assert answer.status == 502
            assert "abort" in error_in(await answer.read())["message"]
        await cancelled(await f.d.next_call())


async def test_a_prefill_engine_that_hangs_up_is_a_failure():
    async def hangs_up(call, request):
        request.transport.abort()
        await asyncio.Event().wait()

    async with routed() as f:
        f.p.script, f.d.script = hangs_up, never
        async with f.post() as answer:
            assert answer.status == 502
            assert error_in(await answer.read())["leg"] == "prefill"
        await cancelled(await f.d.next_call())


async def test_a_prefill_that_takes_too_long_is_a_failure():
    async with routed(limits=Limits(prefill=0.05)) as f:
        f.p.script = f.d.script = never
        async with f.post() as answer:
            assert answer.status == 502
            assert "timed out" in error_in(await answer.read())["message"]
        for call in await both_calls(f):
            await cancelled(call)


async def test_a_decode_engine_that_stays_silent_is_a_failure():
    async with routed(limits=Limits(silence=0.05)) as f:
        f.d.script = fleet.head_only
        async with f.post({"stream": True}) as answer:
            assert answer.status == 502
            error = error_in(await answer.read())
        assert error["leg"] == "decode" and "timed out" in error["message"]


async def test_a_failing_decode_ends_the_prefill_leg():
    async with routed() as f:
        f.p.script, f.d.script = never, fails(500, "no room", "InternalServerError")
        async with f.post() as answer:
            assert answer.status == 502
            error = error_in(await answer.read())
        assert error["leg"] == "decode" and "no room" in error["message"]
        await cancelled(await f.p.next_call())
        await f.idle()


async def test_a_request_that_decode_refuses_is_refused_in_its_own_words():
    async with routed() as f:
        f.p.script, f.d.script = never, fails(404, "no such model", "NotFoundError")
        async with f.post() as answer:
            assert answer.status == 404
            assert error_in(await answer.read())["message"] == "no such model"
        await cancelled(await f.p.next_call())


async def test_an_empty_answer_is_a_failure():
    async def empty(call, request):
        return aiohttp.web.Response(status=200)

    async with routed() as f:
        f.d.script = empty
        async with f.post() as answer:
            assert answer.status == 502
            assert "empty" in error_in(await answer.read())["message"]


async def test_the_prefill_engine_is_blamed_when_decode_failed_in_its_wake():
    async with routed() as f:
        p, d = f.router.fleet.engines
        cause = LegFailed("prefill", p, "the cause")
        consequence = LegFailed("decode", d, "the consequence", status=500)
        refusal = LegFailed("decode", d, "bad request", status=400)
        prefill = asyncio.get_running_loop().create_future()
        prefill.set_exception(cause)
        assert f.router.dispatcher.modes.blame(consequence, prefill) is cause
        assert f.router.dispatcher.modes.blame(refusal, prefill) is refusal


async def test_an_answer_that_breaks_off_is_not_taken_for_a_whole_one():
    async with routed() as f:
        f.d.script = fleet.breaks_off
        answer = await f.post({"stream": True})
        call = await f.d.next_call()
        sent = b"".join(STREAM[:2])
        assert await answer.content.readexactly(len(sent)) == sent
        call.proceed()
        rest = b""
        with pytest.raises(aiohttp.ClientError):
            async for piece in answer.content.iter_any():
                rest += piece
        error = json.loads(rest.removeprefix(b"data: "))["error"]
        assert error["leg"] == "decode"
        await f.idle()
        assert await f.counts() == {"decode_broke_off": 1}


class Leaving:
    """A client that can leave; aiohttp's session would keep its connection otherwise."""

    def __init__(self, f, body):
        self._task = asyncio.ensure_future(f.post(body))

    async def answer(self):
        return await self._task

    async def leave(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_client_that_leaves_before_prefill_ends_cancels_both_legs():
    async with routed() as f:
        f.p.script = f.d.script = never
        client = Leaving(f, None)
        calls = await both_calls(f)
        await client.leave()
        for call in calls:
            await cancelled(call)
        await f.idle()
        assert await f.counts() == {"client_left": 1}


async def test_a_client_that_leaves_before_the_first_token_cancels_the_decode_leg():
    async with routed() as f:
        f.d.script = fleet.head_only
        client = Leaving(f, {"stream": True})
        _, decode = await both_calls(f)
        await f.settled(lambda: True)
        await client.leave()
        await cancelled(decode)
        await f.idle()


@pytest.mark.parametrize("prefill", [never, fleet.answer_json])
async def test_a_client_that_leaves_mid_stream_cancels_what_still_runs(prefill):
    async with routed() as f:
        f.p.script, f.d.script = prefill, fleet.stepwise_stream
        client = Leaving(f, {"stream": True})
        calls = await both_calls(f)
        calls[1].proceed(2)
        answer = await client.answer()
        await answer.content.readexactly(len(STREAM[0]))
        answer.close()
        await cancelled(calls[1])
        if prefill is never:
            await cancelled(calls[0])
        await f.idle()
        assert await f.counts() == {"client_left": 1}


async def test_a_prefill_leg_that_outlives_its_answer_may_end_by_itself_but_not_stay(monkeypatch):
    monkeypatch.setattr(dispatch_module, "LINGER", 0.0)
    async with routed() as f:
        f.p.script = never
        async with f.post() as answer:
            assert answer.status == 200
        await cancelled(await f.p.next_call())
        await f.idle()


async def test_stopping_the_router_ends_lingering_prefill_legs():
    async with routed() as f:
        f.p.script = never
        async with f.post() as answer:
            assert answer.status == 200
        call = await f.p.next_call()
        await f.server.close()
        await cancelled(call)


async def test_many_requests_at_once_do_not_mix():
    async with routed() as f:

        async def echo(call, request):
            return aiohttp.web.json_response({"prompt": call.body["prompt"]})

        f.d.script = echo

        async def one(number):
            async with f.post({"prompt": f"p{number}"}) as answer:
                return (await answer.json())["prompt"] == f"p{number}"

        assert all(await asyncio.gather(*(one(number) for number in range(50))))
        await f.idle()
        assert await f.counts() == {"ok": 50}
