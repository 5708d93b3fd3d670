from __future__ import annotations

import copy
import random

import numpy as np
import pytest

from neuron_push.tiny_model import END_OF_TEXT, TinyModel, make, weights

PROMPT = 200
OUTPUT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make(tmp_path_factory.mktemp("model"))


def test_one_token_per_byte_and_back(folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(map(chr, range(1, 0x250))) + "語"
    ids = tokenizer.encode(text).ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_end_of_text_is_special_and_follows_the_bytes(folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.token_to_id("<|endoftext|>") == END_OF_TEXT
    assert tokenizer.get_vocab_size() == TinyModel().vocabulary
    assert tokenizer.decode([END_OF_TEXT]) == ""


def test_equal_seeds_make_equal_weights():
    first, second = weights(TinyModel(layers=1)), weights(TinyModel(layers=1))
    assert all(np.array_equal(first[name], second[name]) for name in first)
    other = weights(TinyModel(layers=1, seed=1))
    assert not np.array_equal(first["lm_head.weight"], other["lm_head.weight"])


def test_shapes_follow_the_options():
    tensors = weights(TinyModel(layers=3, hidden=64, heads=6, kv_heads=3, head_dim=48))
    assert tensors["model.layers.2.self_attn.q_proj.weight"].shape == (6 * 48, 64)
    assert tensors["model.layers.2.self_attn.k_proj.weight"].shape == (3 * 48, 64)
    assert "model.layers.3.self_attn.k_proj.weight" not in tensors


def test_kv_bytes_per_token_counts_both_planes_of_every_layer():
    assert TinyModel(layers=3, kv_heads=2, head_dim=32).kv_bytes_per_token == 3 * 2 * 2 * 32 * 4


@pytest.mark.parametrize("wrong", [{"vocabulary": 256}, {"heads": 4, "kv_heads": 3}])
def test_impossible_shapes_are_refused(wrong):
    with pytest.raises(ValueError):
        TinyModel(**wrong)


class Greedy:
    """Greedy continuations from a KV cache that the test may damage first."""

    def __init__(self, folder):
        torch = pytest.importorskip("torch")
        transformers = pytest.importorskip("transformers")
        torch.set_num_threads(1)
        self.torch = torch
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32
        ).eval()

    def prefill(self, prompt, chunk):
        cache = None
        with self.torch.no_grad():
            for start in range(0, len(prompt), chunk):
                ids = self.torch.tensor([prompt[start : start + chunk]])
                cache = self.model(ids, past_key_values=cache, use_cache=True).past_key_values
        return cache

    def decode(self, cache, last):
        output, token = [], last
        cache = copy.deepcopy(cache)
        with self.torch.no_grad():
            for _ in range(OUTPUT):
                ids = self.torch.tensor([[token]])
                logits = self.model(ids, past_key_values=cache, use_cache=True).logits
                token = int(logits[0, -1].argmax())
                output.append(token)
        return output

    def flip_top_byte(self, cache, choose):
        """Invert the byte that holds a random element's sign and most of its exponent."""
        damaged = copy.deepcopy(cache)
        layer = choose.choice(damaged.layers)
        tensor = choose.choice([layer.keys, layer.values])
        where = tuple(choose.randrange(size) for size in tensor.shape)
        pattern = tensor[where].reshape(1).view(self.torch.int32) ^ self.torch.tensor(-(1 << 24))
        tensor[where] = pattern.to(self.torch.int32).view(self.torch.float32)[0]
        return damaged


@pytest.fixture(scope="module")
def greedy(folder):
    return Greedy(folder)


@pytest.fixture
def prompts():
    choose = random.Random(5)
    return [[choose.randrange(32, 127) for _ in range(PROMPT)] for _ in range(4)]


def test_outputs_vary_with_the_prompt_and_within_it(greedy, prompts):
    outputs = [greedy.decode(greedy.prefill(p[:-1], PROMPT), p[-1]) for p in prompts]
    assert len({tuple(output) for output in outputs}) == len(prompts)
    assert len({token for output in outputs for token in output}) > OUTPUT


def test_chunked_prefill_changes_no_token(greedy, prompts):
    for prompt in prompts:
        whole = greedy.prefill(prompt[:-1], PROMPT)
        chunked = greedy.prefill(prompt[:-1], 37)
        assert greedy.decode(whole, prompt[-1]) == greedy.decode(chunked, prompt[-1])


def test_one_flipped_byte_of_kv_shows_in_the_output(greedy, prompts):
    choose = random.Random(6)
    trials = []
    for prompt in prompts:
        cache = greedy.prefill(prompt[:-1], PROMPT)
        expected = greedy.decode(cache, prompt[-1])
        trials += [
            greedy.decode(greedy.flip_top_byte(cache, choose), prompt[-1]) != expected
            for _ in range(4)
        ]
    assert sum(trials) >= 0.9 * len(trials)
