import numpy as np

from neuron_push.emulation import pattern


def test_every_row_of_a_small_model_is_different():
    key = pattern.keys(np.arange(50), np.arange(50), 0)
    base = pattern.bases(range(4), 2, range(3), 4)
    rows = (base[None] ^ key[:, None, None, None, None]).reshape(-1, 4)
    assert len({row.tobytes() for row in rows}) == len(rows)


def test_a_row_depends_on_token_and_position_and_seed():
    same = pattern.keys(np.array([7, 7, 8]), np.array([1, 2, 1]), 0)
    assert len(set(same.tolist())) == 3
    assert pattern.keys(np.array([7]), np.array([1]), 1)[0] != same[0]


def test_the_continuation_is_a_function_of_the_whole_prompt():
    tokens = list(range(40, 80))
    first = pattern.continuation(tokens, 8)
    assert first == pattern.continuation(tokens, 8)
    assert first != pattern.continuation([41, *tokens[1:]], 8)
    assert all(33 <= token < 126 for token in first)


def test_more_tokens_begin_with_fewer():
    tokens = list(range(40, 60))
    assert pattern.continuation(tokens, 9)[:4] == pattern.continuation(tokens, 4)
