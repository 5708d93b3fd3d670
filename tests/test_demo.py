"""The demo's options, client and verdict; its engines are tested end to end."""

from __future__ import annotations

import argparse
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from neuron_push.demo import command
from neuron_push.demo.load import Reply, complete_all, random_prompts
from neuron_push.demo.report import Expectation, Moved, Result, Samples, percentile
from neuron_push.errors import ConfigError

EXPECTED = Expectation(prompt_tokens=101, output_tokens=3, kv_bytes_per_token=10, block_size=32)
FINE = Reply(tokens=(1, 2, 3), first_token=0.1, last_token=0.3, prompt_tokens=101)


def result(pushed=(FINE, FINE), alone=(FINE, FINE), held=None, tampered=False, **moved):
    values = {
        "bytes_pushed": 2000,
        "copies": 8,
        "transfer_seconds_mean": 0.01,
        "outcomes": {"done": 2},
        "computed_by_decode": 2,
    }
    movement = Moved(**(values | moved))
    held = {"prefill": "", "decode": ""} if held is None else held
    return Result(EXPECTED, alone, pushed, movement, held, tampered)


def test_a_good_run_succeeds(capsys):
    assert result().failures() == []
    assert command.conclude(result(), as_json=True) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["requests"] == report["token_exact"] == 2
    assert report["bytes_pushed"] == 2000
    assert report["ttft_ms_p50"] == 100 and report["tpot_ms_mean"] == 100
    assert report["ok"] is True and report["failures"] == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pushed": (FINE, Reply((1, 2, 4), 0.1, 0.3))}, "1 of 2 outputs differ"),
        ({"pushed": (FINE, Reply((1, 2), 0.1, 0.3))}, "1 of 2 outputs differ"),
        ({"pushed": (FINE, Reply(error="HTTP 502: no"))}, "to the router failed, first: HTTP 502"),
        ({"alone": (FINE, Reply(error="gone"))}, "to the single engine failed"),
        ({"bytes_pushed": 0}, "nothing was pushed"),
        ({"bytes_pushed": 1999}, "only 1999 bytes"),
        ({"computed_by_decode": 65}, "computed 65 prompt tokens itself"),
        ({"held": {"prefill": "", "decode": "x is 0.5"}}, "decode does not come to rest: x is 0.5"),
    ],
)
def test_everything_that_can_go_wrong_fails_the_run(changes, reason, capsys):
    failed = result(**changes)
    assert any(reason in line for line in failed.failures())
    assert command.conclude(failed, as_json=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("FAILED:") and reason in line for line in lines)
    assert json.loads(lines[-1])["ok"] is False


def test_equal_but_short_answers_are_not_exact():
    short = Reply((1, 2), 0.1, 0.3)
    assert result(pushed=(short, FINE), alone=(short, FINE)).token_exact == 1


def test_two_equal_failures_are_not_exact():
    failed = Reply(error="x")
    assert result(pushed=(failed, FINE), alone=(failed, FINE)).token_exact == 1


def test_a_tampered_run_says_whether_it_showed(capsys):
    wrong = Reply((9, 9, 9), 0.1, 0.3)
    assert command.conclude(result(pushed=(FINE, wrong), tampered=True), as_json=False) == 1
    assert "and it showed" in capsys.readouterr().out
    # Undetected tampering is not hidden behind a failure for its own sake.
    assert command.conclude(result(tampered=True), as_json=False) == 0
    assert "did NOT show" in capsys.readouterr().out


def test_one_token_has_no_time_per_token():
    one = Reply((1,), 0.1, 0.1)
    report = result(pushed=(one, one), alone=(one, one)).as_json()
    assert report["tpot_ms_mean"] is None and report["ttft_ms_p50"] == 100


METRICS = """
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.0
# TYPE neuron_push_pinned_blocks gauge
neuron_push_pinned_blocks{engine="0"} 0.0
# TYPE neuron_push_bytes counter
neuron_push_bytes_total{engine="0"} 100.0
neuron_push_bytes_total{engine="1"} 20.0
neuron_push_copies_total{engine="0"} 7.0
neuron_push_sends_total{engine="0",outcome="done"} 3.0
neuron_push_sends_total{engine="0",outcome="failed"} 1.0
# TYPE neuron_push_transfer_seconds histogram
neuron_push_transfer_seconds_bucket{engine="0",le="+Inf"} 4.0
neuron_push_transfer_seconds_count{engine="0"} 4.0
neuron_push_transfer_seconds_sum{engine="0"} 0.5
vllm:prompt_tokens_by_source_total{source="local_compute"} 9.0
vllm:prompt_tokens_by_source_total{source="external_kv_transfer"} 99.0
"""


def test_movement_is_read_from_the_engines_counters():
    after = Samples(METRICS)
    before = Samples(METRICS.replace("} 9.0", "} 4.0"))
    moved = Moved.between(after, before, after)
    assert (moved.bytes_pushed, moved.copies, moved.computed_by_decode) == (120, 7, 5)
    assert moved.transfer_seconds_mean == 0.125
    assert moved.outcomes == {"done": 3, "failed": 1}


def test_an_engine_without_our_metrics_counts_as_having_moved_nothing():
    nothing = Samples("")
    moved = Moved.between(nothing, nothing, nothing)
    assert moved.bytes_pushed == 0 and moved.computed_by_decode is None


def test_an_engine_at_rest_reports_zero_for_both_gauges():
    assert Samples(METRICS).in_use() == ""
    busy = METRICS.replace('usage_perc{engine="0"} 0.0', 'usage_perc{engine="0"} 0.25')
    assert "usage_perc is 0.25" in Samples(busy).in_use()
    assert "pinned_blocks is not reported" in Samples("vllm:kv_cache_usage_perc 0.0\n").in_use()


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([], 0.5, None),
        ([3.0], 0.99, 3.0),
        ([4.0, 1.0, 3.0, 2.0], 0.5, 2.0),
        ([float(n) for n in range(1, 101)], 0.99, 99.0),
    ],
)
def test_percentiles(values, share, expected):
    assert percentile(values, share) == expected


def test_prompts_are_distinct_repeatable_and_of_the_asked_length():
    prompts = random_prompts(8, 50, seed=1)
    assert len(set(prompts)) == 8 and {len(prompt) for prompt in prompts} == {50}
    assert prompts == random_prompts(8, 50, seed=1) != random_prompts(8, 50, seed=2)
    assert all(prompt.isascii() and prompt.isprintable() for prompt in prompts)


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(words)


def test_the_defaults_are_those_of_the_issue():
    args = parse()
    assert (args.requests, args.prompt_tokens, args.output_tokens) == (32, 1000, 16)
    assert not args.json and not args.tamper and args.keep_logs is None


@pytest.mark.parametrize(
    "words", [("--requests", "0"), ("--prompt-tokens", "1"), ("--output-tokens", "-1")]
)
def test_impossible_sizes_are_refused(words):
    with pytest.raises(ConfigError):
        command.check(parse(*words))


def event(**fields):
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


async def ask(handler, prompts=("a",), concurrency=4):
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    async with TestServer(app, host="127.0.0.1") as server:
        url = str(server.make_url("")).rstrip("/")
        return await complete_all(url, "tiny", prompts, 3, concurrency, lambda text: None)


async def test_the_client_collects_tokens_over_all_events():
    async def handler(request):
        body = await request.json()
        assert body["temperature"] == 0 and body["ignore_eos"] and body["return_token_ids"]
        first = ord(body["prompt"])
        lines = event(choices=[{"token_ids": [first], "prompt_token_ids": [0] * 100_000}])
        lines += event(choices=[{"token_ids": [2, 3]}]) + event(choices=[{"token_ids": []}])
        lines += event(choices=[], usage={"prompt_tokens": 7}) + b"data: [DONE]\n\n"
        return web.Response(body=lines, content_type="text/event-stream")

    replies = await ask(handler, ["a", "b"])
    assert [reply.tokens for reply in replies] == [(97, 2, 3), (98, 2, 3)]
    assert all(reply.prompt_tokens == 7 and not reply.error for reply in replies)
    assert all(0 < reply.first_token <= reply.last_token for reply in replies)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"no", 503, "HTTP 503: no"),
        (event(error={"message": "gone"}), 200, "gone"),
        (b"data: {\n\n", 200, "not an event"),
    ],
)
async def test_the_client_reports_failures_as_replies(body, status, reason):
    async def handler(request):
        return web.Response(body=body, status=status)

    (reply,) = await ask(handler)
    assert reason in reply.error and not reply.tokens


async def test_no_more_requests_are_under_way_than_asked_for():
    under_way, most = 0, 0

    async def handler(request):
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await request.read()
        under_way -= 1
        return web.Response(body=event(choices=[{"token_ids": [1]}]))

    await ask(handler, ["x"] * 20, concurrency=3)
    assert 1 <= most <= 3
