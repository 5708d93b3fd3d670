"""Log-probabilities and grammars of emulated devices."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest

from neuron_push.emulation import pattern, sampling
from tests.emulation import kit

VOCABULARY = 288
PROMPT = kit.prompt(40)


def test_a_row_begins_with_the_token_and_sums_to_one():
    ids, chances, ranks = sampling.table([5, 0, 287], VOCABULARY, VOCABULARY)
    assert ids.shape == chances.shape == (3, VOCABULARY + 1) and ranks.tolist() == [1, 1, 1]
    for row, token in zip(range(3), (5, 0, 287), strict=True):
        assert ids[row, 0] == ids[row, 1] == token
        assert sorted(ids[row, 1:]) == list(range(VOCABULARY))
        assert np.exp(chances[row, 1:].astype(np.float64)).sum() == pytest.approx(1, rel=1e-5)
        assert chances[row, 0] == chances[row].max()


@pytest.mark.parametrize("top", [0, 1, 4])
def test_rows_are_as_wide_as_asked(top):
    ids, chances, _ = sampling.table([7, 9], top, VOCABULARY)
    assert ids.shape == chances.shape == (2, top + 1)


def test_minus_one_asks_for_the_whole_vocabulary():
    asked = SimpleNamespace(num_logprobs=-1, prompt_logprobs=2)
    assert sampling.wanted(asked, VOCABULARY) == (VOCABULARY, 2)
    assert sampling.wanted(None, VOCABULARY) == (None, None)


def grammar(name, tokens):
    bits = np.zeros(VOCABULARY, np.uint8)
    bits[list(tokens)] = 1
    mask = np.packbits(bits, bitorder="little").view(np.int32)
    return SimpleNamespace(structured_output_request_ids=[name], grammar_bitmask=mask[None])


def test_masks_are_read_as_vllm_writes_them():
    found = sampling.allowed(grammar("r", [3, 64, 287]), VOCABULARY)
    assert {name: tokens.tolist() for name, tokens in found.items()} == {"r": [3, 64, 287]}
    assert sampling.allowed(None, VOCABULARY) == {}


def test_tokens_are_drawn_out_of_what_is_allowed():
    drawn = {pattern.next_token(seed, 9, np.array([4, 50, 60])) for seed in range(40)}
    assert drawn == {50, 60}  # printable
    assert pattern.next_token(1, 9, np.array([256])) == 256
    assert pattern.next_token(1, 9, np.arange(300)) == pattern.next_token(1, 9)


def test_bytes_do_not_wait_for_the_grammar_and_tokens_do():
    engine = kit.Engine()
    new = kit.output(new=[("r", PROMPT, [1, 2, 3], 0)], scheduled={"r": 40})
    step = engine.writer.launch(engine.requests.update(new), drawable=False)
    working = threading.Thread(target=engine.writer.execute, args=(step,), daemon=True)
    working.start()
    assert step.written.wait(10) and not step.done.is_set()
    step.allow({"r": np.array([65])})
    working.join(10)
    assert step.done.is_set() and step.sampled == [[65]]
