"""What the router knows of its engines, and how it notices that they have changed."""

from __future__ import annotations

import pytest

from neuron_push.errors import Refused
from neuron_push.protocol import Refusal
from tests.router.fleet import SEMANTICS, error_in, fails, never, routed, who

# No engine is asked again during a test unless the test or a failure says so.
CALM = {"refresh": 3600.0}


def engines(f):
    return f.router.fleet.engines


async def post(f):
    async with f.post() as answer:
        return answer.status, await answer.read()


async def test_a_restarted_engine_is_used_under_its_new_identity():
    async with routed(**CALM) as f:
        p, _ = engines(f)
        f.p.info = who("reborn", incarnation=2)
        await f.router.watch.refresh(p)
        assert p.restarts == 1 and not p.trouble
        assert (await post(f))[0] == 200
        assert (await f.d.next_call()).params["remote_engine_id"] == "reborn"


async def test_a_new_incarnation_under_the_same_id_counts_as_a_restart():
    async with routed(**CALM) as f:
        p, _ = engines(f)
        f.p.info = who(f.p.info.engine, incarnation=2)
        await f.router.watch.refresh(p)
        await f.router.watch.refresh(p)
        assert p.restarts == 1


async def test_a_failed_leg_makes_the_router_ask_again_at_once():
    async with routed(**CALM) as f:
        p, _ = engines(f)
        f.p.script, f.d.script = fails(500, "stale identity"), never
        f.p.info = who("reborn", incarnation=2)
        assert (await post(f))[0] == 502
        await f.settled(lambda: p.info.engine == "reborn")


async def test_a_bad_request_does_not_cast_doubt_on_an_engine():
    async with routed(**CALM) as f:
        f.p.info = who("reborn", incarnation=2)
        f.p.script, f.d.script = fails(400, "bad request"), never
        assert (await post(f))[0] == 400
        assert not f.router.watch._wake[id(engines(f)[0])].is_set()
        assert engines(f)[0].info.engine == "prefill-0"


async def test_an_engine_that_does_not_answer_is_not_used_and_comes_back():
    async with routed(**CALM) as f:
        p, _ = engines(f)
        there, f.p.info = f.p.info, None
        f.router.watch.suspect(p)
        await f.settled(lambda: p.trouble)
        status, raw = await post(f)
        assert status == 503
        assert f"nobody answers at 127.0.0.1:{f.p.side.port}" in error_in(raw)["message"]
        assert f.p.calls.empty() and f.d.calls.empty()
        f.p.info = there
        await f.settled(lambda: not p.trouble)
        assert (await post(f))[0] == 200
        assert p.restarts == 0


async def test_an_unknown_port_is_named_in_health_and_pairs():
    async with routed(**CALM) as f:
        f.d.info = None
        await f.router.watch.refresh(engines(f)[1])
        async with f.session.get(f.url("/health")) as answer:
            assert answer.status == 503
            health = await answer.json()
        assert any("nobody answers" in reason for reason in health["reasons"])
        async with f.session.get(f.url("/pairs")) as answer:
            (pair,) = (await answer.json())["pairs"]
        assert not pair["usable"] and "nobody answers" in pair["reasons"][0]


async def test_a_server_that_is_not_healthy_yet_is_not_used():
    async with routed(**CALM) as f:
        f.d.healthy = False
        await f.router.watch.refresh(engines(f)[1])
        assert "/health answered 503" in engines(f)[1].trouble


async def test_a_server_that_is_gone_is_not_used():
    async with routed(**CALM) as f:
        await f.d.server.close()
        await f.router.watch.refresh(engines(f)[1])
        assert engines(f)[1].trouble.startswith("server ")
        assert (await post(f))[0] == 503


async def test_an_answer_of_another_kind_is_told():
    async with routed(**CALM) as f:
        f.p.info = Refusal("not today")
        await f.router.watch.refresh(engines(f)[0])
        assert engines(f)[0].trouble == "side channel answered Refusal to Who"


async def test_a_refusal_is_told_with_its_reason():
    async with routed(**CALM) as f:

        async def refuse(address, message, patience):
            raise Refused("no strangers")

        f.router.watch._ask = refuse
        await f.router.watch.refresh(engines(f)[0])
        assert "no strangers" in engines(f)[0].trouble


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"role": "kv_consumer"}, "cannot serve as prefill"),
        ({"modes": ("pull",)}, "does not serve push"),
        ({"world": 2}, "1 of 2 worker ranks"),
    ],
)
async def test_an_engine_that_cannot_serve_says_why(changes, reason):
    async with routed(**CALM) as f:
        f.p.info = who("prefill-0", **changes)
        await f.router.watch.refresh(engines(f)[0])
        assert reason in engines(f)[0].trouble
        assert (await post(f))[0] == 503


async def test_engines_of_different_models_are_not_paired():
    async with routed(decode=2, **CALM) as f:
        other = type(SEMANTICS)("tiny", 3, 2, 32, "float32", ("full",))
        f.decode[0].info = who("decode-100", role="kv_consumer", semantics=other)
        await f.router.watch.refresh(f.router.fleet.decode[0])
        async with f.session.get(f.url("/pairs")) as answer:
            first, second = (await answer.json())["pairs"]
        assert first["reasons"] == ["layers: prefill 2, decode 3"] and second["usable"]
        for _ in range(3):
            assert (await post(f))[0] == 200
        assert f.decode[0].calls.empty() and f.decode[1].calls.qsize() == 3


async def test_a_fleet_without_a_compatible_pair_answers_503_with_the_reason():
    async with routed(**CALM) as f:
        other = type(SEMANTICS)("tiny", 2, 2, 32, "bfloat16", ("full",))
        f.d.info = who("decode-100", role="kv_consumer", semantics=other)
        await f.router.watch.refresh(engines(f)[1])
        status, raw = await post(f)
        assert status == 503
        assert "dtype: prefill float32, decode bfloat16" in error_in(raw)["message"]


async def test_a_large_fleet_is_asked_more_slowly(monkeypatch):
    from neuron_push.router import watch

    monkeypatch.setattr(watch, "MOST_ASKED", 2 / 3600.0)
    async with routed(refresh=0.01) as f:
        asked = []

        async def counting(address, message, patience):
            asked.append(address)
            return f.by_side[address].info

        f.router.watch._ask = counting
        for _ in range(5):
            async with f.post() as answer:
                assert answer.status == 200
        assert len(asked) <= 2
