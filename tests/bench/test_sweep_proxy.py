"""The proxy of a sweep, between a client and engines that note what they are asked."""

import asyncio

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from neuron_push.bench.sweep.proxy import Engine, Proxy, Record, Target

ANSWER = {"kv_transfer_params": {"remote_block_ids": [[1, 2]]}, "choices": [{"text": "a"}]}


class Fake:
    """An engine."""

    def __init__(self, *, status=200, delay=0.0, answer=ANSWER):
        self.asked, self.status, self.delay, self.said = [], status, delay, answer
        self.app = web.Application()
        self.app.router.add_post("/v1/completions", self.answer)

    async def answer(self, request):
        body = await request.json()
        self.asked.append((body, request.headers["X-Request-Id"]))
        await asyncio.sleep(self.delay)
        if self.status != 200:
            return web.Response(status=self.status, text="no room")
        if body.get("stream"):
            return web.Response(text='data: {"choices":[{"text":"b"}]}\n\n')
        return web.json_response(self.said)


async def through(dispatch, prefill, decode, requests=1):
    """Answers' statuses and texts, and the proxy's records."""
    async with (
        TestServer(prefill.app) as one,
        TestServer(decode.app) as two,
        TestClient(TestServer(Proxy().app())) as client,
    ):
        target = Target(
            dispatch=dispatch,
            prefill=Engine(url=str(one.make_url("")).rstrip("/"), name="P", side_port=77),
            decode=Engine(url=str(two.make_url("")).rstrip("/"), name="D"),
        )
        await client.post("/target", data=msgspec.json.encode(target))
        body = {"prompt": "x", "max_tokens": 8, "stream": True, "stream_options": {}}
        answers = []
        for number in range(requests):
            headers = {"X-Request-Id": f"c{number}"}
            async with client.post("/v1/completions", json=body, headers=headers) as answer:
                answers.append((answer.status, await answer.text()))
        async with client.post("/records") as answer:
            records = msgspec.json.decode(await answer.read(), type=list[Record])
        return answers, records


async def test_push_sends_both_legs_at_once_under_one_id():
    prefill, decode = Fake(delay=0.2), Fake()
    answers, (record,) = await through("push", prefill, decode)
    assert answers == [(200, 'data: {"choices":[{"text":"b"}]}\n\n')]
    (first, name), (second, other) = prefill.asked[0], decode.asked[0]
    assert name == other == record.request and record.client == "c0"
    assert first["max_tokens"] == 1 and not first["stream"] and "stream_options" not in first
    assert first["kv_transfer_params"]["do_remote_decode"]
    assert second["max_tokens"] == 8 and second["stream"]
    params = second["kv_transfer_params"]
    assert params["do_remote_prefill"] and params["remote_engine_id"] == "P"
    assert params["remote_port"] == 77 and params["transfer_id"] == name
    assert 0 < record.first < record.prefilled


async def test_pull_hands_prefills_answer_to_decode():
    prefill, decode = Fake(delay=0.05), Fake()
    _, (record,) = await through("pull", prefill, decode)
    assert decode.asked[0][0]["kv_transfer_params"] == ANSWER["kv_transfer_params"]
    assert record.arrived < record.prefilled < record.first


async def test_pull_without_word_of_where_the_kv_is_fails_instead_of_computing_it_again():
    prefill, decode = Fake(answer={"choices": [{"text": "a"}]}), Fake()
    answers, (record,) = await through("pull", prefill, decode)
    assert answers[0][0] == 502 and "where the KV is" in record.error
    assert not decode.asked


@pytest.mark.parametrize("dispatch", ["prefill", "decode"])
async def test_floors_ask_one_engine_and_transfer_nothing(dispatch):
    prefill, decode = Fake(), Fake()
    await through(dispatch, prefill, decode)
    asked, silent = (prefill, decode) if dispatch == "prefill" else (decode, prefill)
    assert not silent.asked
    assert "kv_transfer_params" not in asked.asked[0][0]
    assert asked.asked[0][0]["max_tokens"] == (1 if dispatch == "prefill" else 8)


async def test_an_engine_that_refuses_is_told_of_and_recorded():
    answers, records = await through("push", Fake(), Fake(status=503), requests=2)
    assert [status for status, _ in answers] == [502, 502]
    assert all("no room" in record.error for record in records)


async def test_before_it_has_a_target_it_refuses():
    async with TestClient(TestServer(Proxy().app())) as client:
        assert (await client.post("/v1/completions", json={})).status == 503
        assert (await client.get("/health")).status == 200
