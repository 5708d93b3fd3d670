from __future__ import annotations

import argparse
import sys

import pytest

from neuron_push.errors import ConfigError
from neuron_push.router import command
from tests.router.fleet import error_in, routed


async def test_health_is_well_when_a_pair_is_usable():
    async with routed() as f, f.session.get(f.url("/health")) as answer:
        assert answer.status == 200
        assert await answer.json() == {"status": "ok", "usable_pairs": 1, "reasons": []}


async def test_models_come_from_a_decode_engine():
    async with routed() as f, f.session.get(f.url("/v1/models")) as answer:
        assert (await answer.json())["data"][0]["id"] == "decode-100"


async def test_models_come_from_the_decode_engine_that_answers():
    async with routed(decode=2) as f:
        await f.decode[0].server.close()
        async with f.session.get(f.url("/v1/models")) as answer:
            assert (await answer.json())["data"][0]["id"] == "decode-101"
        await f.decode[1].server.close()
        async with f.session.get(f.url("/v1/models")) as answer:
            assert answer.status == 502


@pytest.mark.parametrize("data", [b"{", b"[1]", b""])
async def test_a_bad_body_is_refused_without_a_dispatch(data):
    async with routed() as f:
        async with f.session.post(f.url("/v1/completions"), data=data) as answer:
            assert answer.status == 400
            assert error_in(await answer.read())["type"] == "invalid_request_error"
        assert f.p.calls.empty() and f.d.calls.empty()
        assert await f.counts() == {"bad_request": 1}


async def test_an_overlong_body_is_refused():
    async with routed(most_body=1000) as f, f.post({"prompt": "x" * 1000}) as answer:
        assert answer.status == 413
        assert "1000 bytes" in error_in(await answer.read())["message"]


async def test_metrics_tell_ready_engines_and_the_time_to_the_first_byte():
    async with routed(decode=2) as f:
        async with f.post() as answer:
            assert answer.status == 200
        async with f.session.get(f.url("/metrics")) as answer:
            lines = (await answer.text()).splitlines()
        assert 'neuron_push_router_engines_ready{leg="decode"} 2.0' in lines
        assert 'neuron_push_router_first_byte_seconds_count{mode="disagg"} 1.0' in lines
        assert "neuron_push_router_in_flight 0.0" in lines


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.settings(parser.parse_args(words))


def test_the_command_line_names_engines_and_limits():
    words = ["--prefill", "http://p:1", "--decode", "http://d:2#side=7", "--decode", "http://e:3"]
    settings = parse(*words, "--side-channel-port", "9", "--prefill-timeout", "3")
    assert [(place.side.host, place.side.port) for place in settings.prefill] == [("p", 9)]
    assert [place.side.port for place in settings.decode] == [7, 9]
    assert settings.limits.prefill == 3


@pytest.mark.parametrize("wrong", [("--refresh", "0"), ("--max-body", "-1"), ("--decode", "x")])
def test_wrong_options_are_refused(wrong):
    with pytest.raises(ConfigError):
        parse("--prefill", "http://p", "--decode", "http://d", *wrong)


def test_both_legs_are_required():
    with pytest.raises(ConfigError, match="both legs"):
        parse("--prefill", "http://p")
    with pytest.raises(ConfigError, match="one place"):
        parse()


def test_the_router_runs_without_vllm_torch_and_nixl():
    import subprocess

    code = (
        "import sys, neuron_push.router.command, neuron_push.sidechannel\n"
        "print([name for name in ('vllm', 'torch', 'nixl', 'nixl_cu12') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
