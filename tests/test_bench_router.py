"""The router's benchmark runs, and its parts measure what they say."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest

from neuron_push.bench.fakes import JSON_ANSWER, MockEngine, Tally, load, request_end


def test_messages_end_where_their_head_says():
    assert request_end(b"GET / HTTP/1.1\r\n\r\nmore") == 18
    assert request_end(b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabcd") == 41
    assert request_end(b"POST / HTTP/1.1\r\ncontent-length: 9\r\n\r\nabcd") == 0
    assert request_end(b"x HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\n") > 0
    assert request_end(b"GET / HT") == 0


async def test_the_load_counts_answers_and_errors():
    loop = asyncio.get_running_loop()
    for answer, errors in ((JSON_ANSWER, 0), (JSON_ANSWER.replace(b"200", b"502", 1), 50)):
        server = await loop.create_server(lambda a=answer: MockEngine(a), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        tally = await load(port, 50, 4, 100, False)
        assert len(tally.times) == 50 and tally.errors == errors and tally.rate > 0
        server.close()


def test_percentiles():
    assert Tally([3.0, 1.0, 2.0]).percentile(0.5) == 2.0
    assert Tally().percentile(0.5) == 0.0


@pytest.mark.slow
def test_the_benchmark_prints_the_router_next_to_a_proxy():
    words = "bench router --requests 300 --single 50 --soak 300 --engines 1 --stream --json"
    done = subprocess.run(
        [sys.executable, "-m", "neuron_push.cli", *words.split()],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    figures = report["figures"]
    assert {"no proxy", "router", "minimal proxy", "minimal serial proxy"} <= set(figures)
    assert all(each["errors"] == 0 for each in figures.values())
    # The target figures belong to a quiet machine; that the order of magnitude is right is not.
    assert report["added_ttft_p50_ms"] < 20
    assert len(report["soak"]["resident_kib"]) == 10
