"""Names that must mean the same on both engines."""

from types import SimpleNamespace

import pytest
import torch
from msgspec.structs import replace
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from neuron_push import prompts
from neuron_push.vllm import identity
from tests.vllm.kit import cache_config, engine_config


def match_of(*said):
    name = identity.name_of(*said)
    return prompts.match_of(name) if isinstance(name, prompts.Prompt) else name


def request(name="cmpl-7-0-00aabbcc", tokens=range(200), features=(), lora=None):
    tokens = list(tokens)
    return SimpleNamespace(
        request_id=name, prompt_token_ids=tokens, num_prompt_tokens=len(tokens),
        mm_features=list(features), lora_request=lora,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("cmpl-7-0-00aabbcc", "cmpl-7-0"),
        ("chatcmpl-7-deadbeef", "chatcmpl-7"),
        ("cmpl-7-0", "cmpl-7-0"),
        ("mine-00AABBCC", "mine-00AABBCC"),
        ("mine-00aabbc", "mine-00aabbc"),
        ("", ""),
    ],
)
def test_the_suffix_of_an_engine_is_left_off(name, base):
    assert prompts.base_id(name) == base


def test_prompts_of_one_batch_stay_apart():
    names = [f"cmpl-7-{index}-0000000{index}" for index in range(3)]
    found = [match_of(request(name), "t") for name in names]
    assert [match.transfer for match in found] == ["t#0", "t#1", "t#2"]
    assert match_of(request("chatcmpl-7-deadbeef"), "t").transfer == "t"


def test_both_legs_of_a_batch_give_the_same_match():
    prefill = match_of(request("cmpl-7-1-0000000a"), "t")
    decode = match_of(request("cmpl-7-1-0000000b"), "t", "cmpl-7-0-0000000a")
    assert prefill == decode


def test_without_a_transfer_the_base_ids_pair_and_the_counterpart_wins():
    assert match_of(request("a-0000000a"), "") == match_of(request("a-0000000b"), "")
    assert match_of(request("b-0000000b"), "", "a-0000000a").base == "a"
    assert match_of(request("b-0000000b"), "", "not-an-engine's").base == "b"


def test_prompts_differ_by_their_fingerprints():
    base = match_of(request(), "t")
    ends = [5, *range(1, 200)], [*range(199), 5], range(199)
    for tokens in ends:
        assert match_of(request(tokens=tokens), "t").fingerprint != base.fingerprint
    # With a router's id a sample guards against mistakes; without one every token counts.
    for position in range(200):
        tokens = list(range(200))
        tokens[position] = 999
        assert (
            match_of(request(tokens=tokens), "").fingerprint != match_of(request(), "").fingerprint
        )


def test_images_and_adapters_are_part_of_the_prompt():
    plain = match_of(request(), "t").fingerprint
    image = [SimpleNamespace(identifier="hash-of-an-image")]
    lora = SimpleNamespace(lora_name="adapter")
    others = {
        match_of(request(features=image), "t").fingerprint,
        match_of(request(lora=lora), "t").fingerprint,
    }
    assert len({plain, *others}) == 3


def test_a_prompt_given_as_embeddings_has_no_tokens():
    bare = request()
    bare.prompt_token_ids, bare.mm_features = None, None
    assert match_of(bare, "t").tokens == 200


@pytest.fixture(scope="module")
def config():
    return engine_config()


def test_one_model_has_one_meaning_wherever_it_lies(config):
    here = identity.semantics(config, ["full"])
    config.model_config.model += "/"
    assert identity.semantics(config, ["full"]) == here
    assert (here.layers, here.kv_heads, here.head_size, here.groups) == (2, 2, 32, ("full",))
    assert here.extra == ()


@pytest.mark.parametrize(
    ("field", "other"), [("sliding_window", 77), ("rms_norm_eps", 0.5), ("num_hidden_layers", 77)]
)
def test_models_that_differ_are_told_apart(config, field, other, monkeypatch):
    before = identity.semantics(config, ["full"])
    monkeypatch.setattr(config.model_config.hf_text_config, field, other, raising=False)
    assert identity.semantics(config, ["full"]).model != before.model


def test_element_types_and_kinds_are_part_of_the_meaning(config, monkeypatch):
    before = identity.semantics(config, ["full"])
    assert identity.semantics(config, ["mla"]) != before
    monkeypatch.setattr(config.cache_config, "cache_dtype", "fp8_e4m3")
    assert identity.semantics(config, ["full"]) == replace(before, dtype="fp8_e4m3")


def test_draft_models_keep_kv_and_ngrams_do_not():
    model = SimpleNamespace(model="draft")
    for method, extra in (("eagle", (("draft", "eagle:draft"),)), ("ngram", ()), ("suffix", ())):
        speculative = SimpleNamespace(method=method, draft_model_config=model)
        found = identity.draft_model(SimpleNamespace(speculative_config=speculative))
        assert found == extra
    assert identity.draft_model(SimpleNamespace(speculative_config=None)) == ()


def test_kinds_of_caches():
    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
    assert identity.group_kind(FullAttentionSpec(**common)) == "full"
    assert identity.group_kind(SlidingWindowSpec(**common, sliding_window=64)) == "sliding"
    assert identity.group_kind(MLAAttentionSpec(**{**common, "num_kv_heads": 1})) == "mla"
    state = MambaSpec(block_size=16, shapes=((1,),), dtypes=(torch.float32,))
    assert identity.group_kind(state) == "state"
    uniform = SimpleNamespace(kv_cache_specs={"a": FullAttentionSpec(**common)})
    assert identity.group_kind(uniform) == "full"
    assert identity.group_kind(object()) == "object"
    assert identity.group_kinds(cache_config(4, groups=2)) == ["full", "full"]
