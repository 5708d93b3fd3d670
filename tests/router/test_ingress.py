"""Keys, limits, TLS and readiness at the router's door."""

from __future__ import annotations

import argparse
import asyncio
import ssl
import subprocess

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from neuron_push.errors import ConfigError
from neuron_push.router import command
from neuron_push.router.ingress import Keys
from neuron_push.router.places import Listing, Place
from tests.router import fleet
from tests.router.fleet import error_in, fails, never, routed, until
from tests.router.test_modes import metric

CALM = {"refresh": 3600.0}


@pytest.fixture
def keys(tmp_path):
    path = tmp_path / "keys"
    path.write_text("# tenants\nred:s3cret\n\nblue:other\n")
    return Keys.read(path)


def bearer(token):
    return {"Authorization": f"Bearer {token}"}


async def test_without_a_key_nobody_is_served_and_nothing_is_shown(keys):
    async with routed(keys=keys, **CALM) as f:
        for headers in ({}, bearer("wrong"), {"Authorization": "Basic s3cret"}, bearer("")):
            async with f.post(headers=headers) as answer:
                assert answer.status == 401
                assert error_in(await answer.read())["type"] == "invalid_api_key"
        for path in ("/v1/models", "/pairs", "/requests", "/trace"):
            async with f.session.get(f.url(path)) as answer:
                assert answer.status == 401
        for path in ("/health", "/live", "/metrics"):
            async with f.session.get(f.url(path)) as answer:
                assert answer.status == 200
        assert f.p.calls.empty() and f.d.calls.empty()
        assert await f.counts() == {"unauthorized": 4}


async def test_a_key_lets_in_and_stays_with_the_router(keys):
    async with routed(keys=keys, engine_key="inner", **CALM) as f:
        async with f.post(headers=bearer("s3cret")) as answer:
            assert answer.status == 200
        assert (await f.d.next_call()).headers["Authorization"] == "Bearer inner"
        async with f.session.get(f.url("/pairs"), headers=bearer("other")) as answer:
            assert answer.status == 200
    async with routed(keys=keys, **CALM) as f:
        async with f.post(headers=bearer("s3cret")) as answer:
            assert answer.status == 200
        assert "Authorization" not in (await f.d.next_call()).headers


async def test_one_tenant_cannot_take_all_places(keys):
    async with routed(keys=keys, most_per_tenant=1, most_in_flight=2, **CALM) as f:
        f.d.script = never
        waiting = [asyncio.ensure_future(f.post(headers=bearer("s3cret")))]
        await f.d.next_call()
        async with f.post(headers=bearer("s3cret")) as answer:
            assert answer.status == 429 and answer.headers["Retry-After"] == "1"
        waiting.append(asyncio.ensure_future(f.post(headers=bearer("other"))))
        await f.d.next_call()
        async with f.post(headers=bearer("other")) as answer:
            assert answer.status == 429
        assert metric(f, "limited_total", limit="tenant") == 1
        assert metric(f, "limited_total", limit="in_flight") == 1
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        await f.idle()
        f.d.script = fleet.answer_json
        async with f.post(headers=bearer("s3cret")) as answer:
            assert answer.status == 200


@pytest.mark.parametrize("text", ["", "# only\n", "no-colon\n", ":x\n", "a:\n"])
def test_a_file_without_usable_keys_is_refused(tmp_path, text):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(ConfigError):
        Keys.read(tmp_path / "keys")


def test_keys_are_kept_as_digests(keys):
    assert "s3cret" not in repr(keys)


# ---------------------------------------------------------------------- readiness


async def one_token(call, request):
    return web.json_response({"choices": [{"text": "x", "finish_reason": "length"}]})


async def ready(f):
    async with f.session.get(f.url("/ready")) as answer:
        return answer.status, (await answer.json())["reason"]


async def test_ready_means_that_a_token_came_through_a_pair():
    async with routed(**CALM) as f:
        f.d.script = one_token
        assert await ready(f) == (200, None)
        prefill, decode = await f.p.next_call(), await f.d.next_call()
        assert prefill.params["transfer_id"] == decode.params["transfer_id"]
        assert decode.body["model"] == "decode-100" and decode.body["max_tokens"] == 1
        assert metric(f, "canaries_total", outcome="ok") == 1
        assert await ready(f) == (200, None)
        assert f.p.calls.empty(), "one answer is proof for a while"


async def test_a_served_request_is_proof_enough():
    async with routed(**CALM) as f:
        async with f.post() as answer:
            assert answer.status == 200
        await f.p.next_call()
        assert (await ready(f))[0] == 200
        assert f.p.calls.empty()


@pytest.mark.parametrize(
    "script", [fails(500, "no such engine", "InternalServerError"), fleet.head_only]
)
async def test_engines_that_answer_but_bring_no_token_are_not_ready(script):
    async with routed(canary_timeout=0.1, **CALM) as f:
        f.d.script = script
        async with f.session.get(f.url("/health")) as answer:
            assert answer.status == 200
        status, reason = await ready(f)
        assert status == 503 and reason
        assert metric(f, "canaries_total", outcome="failed") == 3
        assert f.router.fleet.quarantine


async def test_canaries_in_idle_time_find_a_broken_pair_before_a_client_does():
    async with routed(1, 2, canary_period=0.01, **CALM) as f:
        f.decode[0].script = fails(500, "broken", "InternalServerError")
        f.decode[1].script = one_token
        await until(lambda: metric(f, "pairs_quarantined") == 1)
        for _ in range(5):
            async with f.post() as answer:
                assert answer.status == 200


# ---------------------------------------------------------------------- TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2"
    words += f" -keyout {key} -out {cert} -subj /CN=localhost -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(words.split(), check=True, capture_output=True)
    return cert, key


async def test_the_router_serves_tls_and_asks_tls_of_engines(certificate):
    cert, key = certificate
    trusting = ssl.create_default_context(cafile=str(cert))
    async with routed(ready=False, engine_tls=trusting, **CALM) as f:
        engine = fleet.MockEngine("decode", 7)
        secure = TestServer(engine.server.app, host="127.0.0.1", scheme="https")
        await secure.start_server(ssl=command._certificate(cert, key))
        f.by_side[engine.side] = engine
        place = Place(str(secure.make_url("")).rstrip("/"), engine.side)
        f.router.watch.apply(Listing([f.router.fleet.prefill[0].place], [place]))
        await until(lambda: f.router.fleet.decode[0].trouble != "not asked yet")
        assert not f.router.fleet.decode[0].trouble
        async with f.post() as answer:
            assert answer.status == 200
        await secure.close()


def parse(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.settings(
        parser.parse_args(["--prefill", "http://p", "--decode", "http://d", *words])
    )


def test_certificate_and_key_belong_together(certificate, tmp_path):
    with pytest.raises(ConfigError, match="belong together"):
        parse("--tls-cert", str(certificate[0]))
    with pytest.raises(ConfigError, match="--tls-cert"):
        command._certificate(tmp_path / "none", tmp_path / "none")
    with pytest.raises(ConfigError, match="--engine-ca"):
        parse("--engine-ca", str(tmp_path / "none"))


def test_options_become_settings(tmp_path):
    (tmp_path / "key").write_text("inner\n")
    got = parse(
        "--prefer", "trn2:p5en", "--prefer", "p5en:p5en", "--disaggregation", "prefer",
        "--engine-key-file", str(tmp_path / "key"), "--deadline", "3", "--max-per-tenant", "4",
    )  # fmt: skip
    assert list(got.preferred) == [("trn2", "p5en"), ("p5en", "p5en")]
    assert (got.engine_key, got.limits.first_byte, got.most_per_tenant) == ("inner", 3.0, 4)
    assert got.rules.disaggregation == "prefer"
    for wrong in (("--prefer", "x"), ("--retries", "-1"), ("--engines-file", "x")):
        with pytest.raises(ConfigError):
            parse(*wrong)
