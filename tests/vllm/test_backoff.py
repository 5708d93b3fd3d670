"""State pages: prefill stops one token short, decode computes that token over the state it got."""

import contextlib
from types import SimpleNamespace

import pytest

from neuron_push.commands import Offer, Receive, Retire, Settle
from neuron_push.vllm import compat
from neuron_push.vllm.identity import backoff
from neuron_push.vllm.prefills import shorten
from tests.vllm.kit import DECODE, PREFILL, Engine, of_kind, state_spec

pytestmark = pytest.mark.skipif(
    not compat.FAILS_BY_REQUEST, reason="this vLLM cannot fail loads of several cache groups"
)


@pytest.fixture
def start():
    engines = []

    def make(**options):
        engines.append(Engine(state=state_spec(), prefix_caching=False, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def test_prefill_computes_all_but_the_last_token_and_offers_the_whole_prompt(start):
    engine = start(tokens=64)
    request = engine.add(100, PREFILL, output=5)
    first, second = engine.step(), engine.step()
    (offer,) = of_kind(first, Offer)
    settles = [*of_kind(first, Settle), *of_kind(second, Settle)]
    assert offer.match.tokens == 100
    assert [(settle.stop, settle.last) for settle in settles] == [(64, False), (99, True)]
    # The state's one block goes with the first range that is settled; its bytes with the last.
    assert [len(settle.blocks[1]) for settle in settles] == [1, 0]
    assert of_kind(engine.step(), Retire) == [Retire(offer.source, "finished")]
    assert engine.last_output(request).new_token_ids == [7]  # one token, whatever was asked for


def test_decode_registers_all_but_the_last_token_and_computes_that_one(start):
    engine = start(tokens=256)
    request = engine.add(100, DECODE)
    (receive,) = of_kind(engine.step(), Receive)
    assert (receive.start, receive.stop, receive.match.tokens) == (0, 99, 100)
    assert [len(ids) for ids in receive.blocks] == [7, 1]
    engine.step(received=(request.request_id,))
    output, _ = engine.schedule()
    assert output.num_scheduled_tokens == {request.request_id: 1}
    engine.update(output)


def test_both_legs_of_one_prompt_have_the_same_fingerprint(start):
    prefill, decode = start(), start()
    prefill.add(50, PREFILL)
    decode.add(50, DECODE)
    (offer,) = of_kind(prefill.step(), Offer)
    (receive,) = of_kind(decode.step(), Receive)
    assert offer.match.fingerprint == receive.match.fingerprint


def test_a_prompt_of_one_token_is_computed_on_both_sides(start):
    engine = start()
    engine.add(1, PREFILL)
    (settle,) = of_kind(engine.step(), Settle)
    assert settle.stop == 1
    request = engine.add(1, DECODE)
    output, meta = engine.schedule()
    assert request.request_id in output.num_scheduled_tokens
    (declined,) = of_kind(meta, Receive)
    assert declined.start == declined.stop == 0
    engine.update(output)


def test_a_preempted_prefill_is_not_shortened_again(start):
    engine = start(tokens=256)
    request = engine.add(100, PREFILL)
    engine.schedule()
    with contextlib.suppress(RuntimeError):
        engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    settles = [settle for _ in range(3) for settle in of_kind(engine.step(), Settle)]
    assert settles and {settle.stop for settle in settles} == {99}
    assert request.num_prompt_tokens == 99


def test_the_clients_own_list_is_left_alone():
    mine = [1, 2, 3]
    request = SimpleNamespace(
        prompt_token_ids=mine, prompt_embeds=None, _all_token_ids=[1, 2, 3], num_prompt_tokens=3,
        max_tokens=9,
    )  # fmt: skip
    shorten(request, 1)
    assert (mine, request.prompt_token_ids, request._all_token_ids) == ([1, 2, 3], [1, 2], [1, 2])
    assert (request.num_prompt_tokens, request.max_tokens) == (2, 1)
    shorten(request, 2)
    assert request.num_prompt_tokens == 2  # nothing would be left


@pytest.mark.parametrize(
    ("kinds", "method", "ahead", "tokens"),
    [
        (("full",), None, 0, 0),
        (("full", "state"), None, 0, 1),
        (("full",), "eagle", 1, 1),
        (("full",), "mtp", 3, 2),
        (("full",), "ngram", 0, 0),
    ],
)
def test_how_many_tokens_prefill_leaves(kinds, method, ahead, tokens):
    speculative = None
    if method:
        draft = SimpleNamespace(model="draft")
        speculative = SimpleNamespace(method=method, draft_model_config=draft)
    config = SimpleNamespace(speculative_config=speculative, num_prefill_lookahead_tokens=ahead)
    assert backoff(config, kinds) == tokens
