"""Retries, deadlines, late choice, decode-only service, room, drains: what ends how."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest
from aiohttp import web

from neuron_push.protocol import Held
from neuron_push.router import drains
from neuron_push.router.dispatch import Rules
from neuron_push.router.jobs import Job
from neuron_push.router.legs import Limits
from tests.router import fleet
from tests.router.fleet import STREAM, error_in, fails, never, routed, until

CALM = {"refresh": 3600.0}
MODE = "x-neuron-push-mode"
broken = fails(500, "broken", "InternalServerError")


def metric(f, name, **labels):
    return f.router.metrics.registry.get_sample_value(f"neuron_push_router_{name}", labels) or 0


# ---------------------------------------------------------------------- retries


@pytest.mark.parametrize("leg", ["prefill", "decode"])
async def test_a_failed_leg_is_tried_on_another_engine_under_another_transfer_id(leg):
    async with routed(2, 2, **CALM) as f:
        bad = getattr(f, leg)
        bad[0].script = bad[1].script = broken_once = once(broken)
        other = f.decode if leg == "prefill" else f.prefill
        other[0].script = other[1].script = once(never)
        async with f.post() as answer:
            assert answer.status == 200
        assert broken_once.used
        calls = [e.calls.get_nowait() for e in bad if not e.calls.empty()]
        assert len(calls) == 2 and len({c.params["transfer_id"] for c in calls}) == 2
        assert metric(f, "retries_total", leg=leg) == 1
        assert metric(f, "requests_total", outcome="ok") == 1


def once(script):
    """The given script for the first call, then a good answer."""

    async def both(call, request):
        if not both.used:
            both.used = True
            return await script(call, request)
        return await fleet.answer_json(call, request)

    both.used = False
    return both


async def test_a_lone_engine_is_tried_again_and_then_the_failure_is_told():
    async with routed(rules=Rules(retries=2), **CALM) as f:
        f.p.script, f.d.script = broken, never
        async with f.post() as answer:
            assert answer.status == 502
        assert f.p.calls.qsize() == 3


@pytest.mark.parametrize("status", [400, 404, 413, 422])
async def test_what_is_the_clients_fault_is_neither_tried_again_nor_held_against_anybody(status):
    async with routed(2, 2, **CALM) as f:
        for engine in f.prefill:
            engine.script = fails(status, "your fault")
        for engine in f.decode:
            engine.script = never
        for _ in range(5):
            async with f.post() as answer:
                assert answer.status == status
        assert sum(e.calls.qsize() for e in f.prefill) == 5
        assert not f.router.fleet.quarantine
        assert metric(f, "quarantines_total") == 0


async def test_a_busy_engine_is_passed_over_without_blame():
    async with routed(2, 1, **CALM) as f:
        f.prefill[0].script = f.prefill[1].script = once(fails(429, "busy"))
        f.d.script = once(never)
        async with f.post() as answer:
            assert answer.status == 200
        assert not f.router.fleet.quarantine


async def test_nothing_is_tried_again_after_the_first_byte():
    async with routed(1, 2, **CALM) as f:
        for engine in f.decode:
            engine.script = fleet.breaks_off
        answer = await f.post({"stream": True})
        call = await asyncio.wait_for(next_of(f.decode), 10)
        await answer.content.readexactly(len(STREAM[0]))
        call.proceed()
        with pytest.raises(aiohttp.ClientError):
            async for _ in answer.content.iter_any():
                pass
        assert sum(e.calls.qsize() for e in f.decode) == 0


async def next_of(engines):
    tasks = [asyncio.ensure_future(e.calls.get()) for e in engines]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    return done.pop().result()


async def test_a_pair_that_keeps_failing_is_left_out_and_its_engines_serve_on():
    async with routed(1, 2, rules=Rules(retries=0), **CALM) as f:
        bad, _ = f.decode
        bad.script = broken
        statuses = []
        for _ in range(12):
            async with f.post() as answer:
                statuses.append(answer.status)
        assert statuses.count(502) == 2 and statuses[-6:] == [200] * 6
        assert metric(f, "quarantines_total") == 1
        async with f.session.get(f.url("/pairs")) as answer:
            rows = (await answer.json())["pairs"]
        assert [row["usable"] for row in rows] == [False, True]
        assert "quarantined" in rows[0]["reasons"][0]
        assert all(not engine.trouble for engine in f.router.fleet.engines)


# ---------------------------------------------------------------------- deadlines


async def test_a_deadline_travels_to_both_legs_and_ends_the_request():
    async with routed(**CALM) as f:
        f.p.script = f.d.script = never
        async with f.post(headers={"X-Neuron-Push-Deadline-Ms": "150"}) as answer:
            assert answer.status == 504
        for call in (await f.p.next_call(), await f.d.next_call()):
            assert 0 < call.params["deadline_ms"] <= 150
            await asyncio.wait_for(call.cancelled.wait(), 10)
        assert await f.counts() == {"late": 1}


async def test_the_routers_own_deadline_bounds_what_a_client_asks_for():
    async with routed(limits=Limits(first_byte=0.1), **CALM) as f:
        f.d.script = never
        async with f.post(headers={"X-Neuron-Push-Deadline-Ms": "60000"}) as answer:
            assert answer.status == 504


async def test_the_kv_budget_is_the_smaller_of_setting_and_deadline():
    async with routed(limits=Limits(kv=0.05), **CALM) as f:
        async with f.post(headers={"X-Neuron-Push-Deadline-Ms": "9000"}) as answer:
            assert answer.status == 200
        assert (await f.d.next_call()).params["deadline_ms"] == 50


@pytest.mark.parametrize("value", ["x", "0", "-1", "1e3", "99999999999"])
async def test_a_deadline_that_is_none_is_refused(value):
    async with (
        routed(**CALM) as f,
        f.post(headers={"X-Neuron-Push-Deadline-Ms": value}) as answer,
    ):
        assert answer.status == 400


# ---------------------------------------------------------------------- modes


async def prompt_is_held(call, request):
    params = {"remote_block_ids": [[1, 2]], "remote_engine_id": "prefill-0", "x": "kept"}
    return web.json_response({"choices": [], "kv_transfer_params": params})


def pulling(f):
    for engine in (*f.prefill, *f.decode):
        engine.info = f.who(engine.info.engine, role=engine.info.role, modes=("push", "pull"))


async def test_pull_chooses_the_decode_engine_after_prefill():
    rules = Rules(mode="pull")
    async with routed(1, 2, ready=False, rules=rules) as f:
        pulling(f)
        await f.all_ready()
        first, second = f.router.fleet.decode

        async def while_the_first_gets_busy(call, request):
            first.in_flight += 5
            return await prompt_is_held(call, request)

        f.p.script = while_the_first_gets_busy
        async with f.post() as answer:
            assert answer.status == 200
            assert answer.headers[MODE] == "pull"
        first.in_flight -= 5
        assert f.decode[0].calls.empty()
        call = await f.decode[1].next_call()
        assert call.params["remote_block_ids"] == [[1, 2]] and call.params["x"] == "kept"
        assert metric(f, "modes_total", mode="pull") == 1
        await f.idle()
        assert second.in_flight == 0


async def test_a_pull_waits_for_room_after_prefill():
    async with routed(ready=False, rules=Rules(mode="pull"), **CALM) as f:
        f.p.info = f.who("prefill-0", modes=("pull",))
        sizes = {"free_blocks": 10, "total_blocks": 10, "block_tokens": 16}
        f.d.info = f.who("decode-100", role="kv_consumer", modes=("pull",), **sizes)
        await f.all_ready()
        decode = f.router.fleet.decode[0]
        decode.promise("other", Job(prompt_tokens=160, output_tokens=0))
        f.p.script = prompt_is_held
        task = asyncio.ensure_future(f.post(BODY))
        await until(lambda: metric(f, "waiting_for_room"))
        assert f.d.calls.empty()
        decode.forgive("other")
        async with await task as answer:
            assert answer.status == 200


async def test_pull_is_refused_where_engines_do_not_serve_it():
    async with routed(ready=False, rules=Rules(mode="pull")) as f:
        await f.settled(lambda: "does not serve pull" in f.router.fleet.prefill[0].trouble)
        async with f.post() as answer:
            assert answer.status == 503


async def test_a_prefill_that_does_not_say_where_the_kv_is_fails_a_pull():
    async with routed(ready=False, rules=Rules(mode="pull", retries=0)) as f:
        pulling(f)
        await f.all_ready()
        async with f.post() as answer:
            assert answer.status == 502
            assert "where the KV is" in error_in(await answer.read())["message"]


async def test_decode_serves_alone_only_where_that_is_allowed_and_says_so():
    for disaggregation, status in (("require", 503), ("prefer", 200)):
        rules = Rules(disaggregation=disaggregation)
        async with routed(rules=rules, **CALM) as f:
            f.router.fleet.prefill[0].lost("gone")
            async with f.post({"prompt": "a", "kv_transfer_params": {"x": 1}}) as answer:
                assert answer.status == status
                assert answer.headers.get(MODE) == ("local" if status == 200 else None)
            if status == 200:
                body = (await f.d.calls.get()).body
                assert body == {"prompt": "a"}
                assert metric(f, "modes_total", mode="local") == 1
                assert metric(f, "modes_total", mode="disagg") == 0


async def test_short_prompts_may_be_served_by_decode_alone():
    rules = Rules(disaggregation="prefer", local_below=50)
    async with routed(rules=rules, **CALM) as f:
        for tokens, mode in ((49, "local"), (50, "disagg")):
            async with f.post({"prompt": [1] * tokens}) as answer:
                assert answer.headers[MODE] == mode


# ---------------------------------------------------------------------- room and drains


def sized(f, free):
    sizes = {"free_blocks": free, "total_blocks": 10, "block_tokens": 16}
    return f.who(f.d.info.engine, role="kv_consumer", **sizes)


BODY = {"prompt": [1] * 80, "max_tokens": 16}


async def test_a_request_waits_for_room_and_is_served_when_blocks_come_back():
    async with routed(**CALM) as f:
        f.d.info = sized(f, 10)
        await f.router.watch.refresh(f.router.fleet.decode[0])
        f.d.script = fleet.stepwise_stream
        first = asyncio.ensure_future(f.post(BODY))
        call = await f.d.next_call()
        second = asyncio.ensure_future(f.post(BODY))
        await until(lambda: metric(f, "waiting_for_room"))
        assert f.d.calls.empty()
        call.proceed(9)
        async with await first as answer:
            await answer.read()
        (await f.d.next_call()).proceed(9)
        async with await second as answer:
            assert answer.status == 200


async def test_a_request_for_which_no_room_is_found_is_turned_away_in_words():
    async with routed(rules=Rules(room=0.05), **CALM) as f:
        f.d.info = sized(f, 2)
        await f.router.watch.refresh(f.router.fleet.decode[0])
        async with f.post(BODY) as answer:
            assert answer.status == 503
            assert answer.headers["Retry-After"] == "1"
            assert "96 tokens" in error_in(await answer.read())["message"]
        assert await f.counts() == {"no_room": 1}


async def test_blocks_of_a_dispatch_that_was_given_up_count_until_the_engine_is_quiet(monkeypatch):
    monkeypatch.setattr(drains, "FIRST", 0.001)
    async with routed(rules=Rules(retries=0), **CALM) as f:
        f.d.info = sized(f, 10)
        decode = f.router.fleet.decode[0]
        await f.router.watch.refresh(decode)
        asked = []
        answers = iter([Held("", 6), Held("", 6), Held("", 0)])

        def held(question):
            asked.append(question.transfer)
            assert decode._promised, "still counted while the engine holds blocks"
            return next(answers)

        f.d.held = held
        f.p.script, f.d.script = broken, never
        async with f.post(BODY) as answer:
            assert answer.status == 502
        await until(lambda: not decode._promised)
        assert len(asked) == 3
        assert set(asked) == {(await f.d.next_call()).params["transfer_id"]}
        assert metric(f, "drain_seconds_count") == 1
        assert metric(f, "cancellations_total", phase="prefill") == 1


async def test_an_engine_that_cannot_say_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(drains, "FIRST", 0.001)
    async with routed(rules=Rules(retries=0), **CALM) as f:
        f.p.script, f.d.script = broken, never
        async with f.post() as answer:
            assert answer.status == 502
        await until(lambda: not f.router.fleet.decode[0]._promised)
        assert metric(f, "undrained_total") == 0


async def test_a_drain_that_is_never_confirmed_is_counted(monkeypatch):
    monkeypatch.setattr(drains, "FIRST", 0.001)
    monkeypatch.setattr(drains, "BOUND", 0.02)
    async with routed(rules=Rules(retries=0), **CALM) as f:
        f.d.held = lambda question: Held("", 1)
        f.p.script, f.d.script = broken, never
        async with f.post() as answer:
            assert answer.status == 502
        await until(lambda: metric(f, "undrained_total"))


async def test_phases_of_cancellations_are_told_apart():
    async with routed(**CALM) as f:
        f.d.script = never
        task = asyncio.ensure_future(f.post())
        await f.p.next_call()
        seen = f.router.flights.report
        await until(lambda: seen()["in_flight"][0]["phase"] == "transfer")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await f.idle()
        assert metric(f, "cancellations_total", phase="transfer") == 1


# ---------------------------------------------------------------------- what people see


async def test_requests_under_way_and_slow_ones_are_shown(monkeypatch):
    from neuron_push.router import flights

    monkeypatch.setattr(flights, "SLOW", 0.0)
    async with routed(**CALM) as f:
        f.d.script = fleet.stepwise_stream
        task = asyncio.ensure_future(f.post(headers={"X-Request-Id": "mine"}))
        call = await f.d.next_call()
        async with f.session.get(f.url("/requests")) as answer:
            (row,) = (await answer.json())["in_flight"]
        assert row["request"] == "mine" and row["prefill"] == f.p.url and row["mode"] == "disagg"
        call.proceed(9)
        async with await task as answer:
            await answer.read()
        await f.idle()
        async with f.session.get(f.url("/requests")) as answer:
            seen = await answer.json()
        assert seen["in_flight"] == [] and seen["slow"][0]["request"] == "mine"


async def test_usage_logprobs_tools_and_what_is_yet_to_come_pass_through_untouched():
    raw = json.dumps({"choices": [], "usage": {"x": 1}, "odd": [1, 2.5]}, indent=3).encode()
    sent = {"messages": [], "tools": [{"type": "function"}], "logprobs": True, "odd": {"a": 1}}

    async def answer_raw(call, request):
        return web.Response(body=raw, content_type="application/json")

    async with routed(**CALM) as f:
        f.d.script = answer_raw
        async with f.post(sent, "/v1/chat/completions") as answer:
            assert await answer.read() == raw
        body = (await f.d.next_call()).body
        body.pop("kv_transfer_params")
        assert body == sent
