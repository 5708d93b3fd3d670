from __future__ import annotations

import json

import pytest

from neuron_push.protocol import Address
from neuron_push.router import bodies
from tests.router.fleet import who

BODY = {
    "model": "m",
    "prompt": ["a", "b"],
    "max_tokens": 64,
    "min_tokens": 5,
    "n": 3,
    "best_of": 4,
    "echo": True,
    "logprobs": 2,
    "stop": ["x"],
    "stream": True,
    "stream_options": {"include_usage": True},
    "temperature": 0.0,
    "truncate_prompt_tokens": 7,
}


def prefill(body, chat=False):
    return json.loads(bodies.prefill_body(body, chat, "t"))


def test_prefill_computes_one_token_and_nothing_else():
    leg = prefill(BODY)
    assert leg.pop("kv_transfer_params")["transfer_id"] == "t"
    assert leg == {
        "model": "m",
        "prompt": ["a", "b"],
        "max_tokens": 1,
        "n": 1,
        "stream": False,
        "ignore_eos": True,
        "temperature": 0.0,
        "truncate_prompt_tokens": 7,
    }


def test_chat_prefill_keeps_what_shapes_the_prompt():
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function"}]}
    body |= {"chat_template_kwargs": {"enable_thinking": False}, "max_completion_tokens": 9}
    leg = prefill(body, chat=True)
    assert leg["max_completion_tokens"] == leg["max_tokens"] == 1
    for name in ("messages", "tools", "chat_template_kwargs"):
        assert leg[name] == body[name]


def test_decode_keeps_the_clients_body():
    leg = json.loads(bodies.decode_body(BODY, who("P"), Address("h", 1), "r", "t"))
    leg.pop("kv_transfer_params")
    assert leg == BODY


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b"[" * 100_000])
def test_what_is_no_json_object_is_refused(raw):
    with pytest.raises(bodies.BadBody):
        bodies.parse(raw)


def test_text_and_numbers_survive_the_round_trip():
    raw = '{"prompt": "a\\u0000é語\\ud83d\\ude00", "seed": 18446744073709551616, "x": 0.1}'.encode()
    leg = prefill(bodies.parse(raw))
    assert leg["prompt"] == "a\0é語😀" and leg["seed"] == 1 << 64 and leg["x"] == 0.1


@pytest.mark.parametrize("offered", ["mine", "cmpl-1.2_3"])
def test_the_clients_request_id_is_kept(offered):
    assert bodies.request_id(offered) == offered


@pytest.mark.parametrize("offered", [None, "", "x" * 1000, "a\tb", "é"])
def test_an_unfit_request_id_is_replaced(offered):
    assert bodies.request_id(offered) not in ("", offered)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b'{"error": {"message": "m"}}', "m"),
        (b'{"message": "m"}', "m"),
        (b'{"detail": "m"}', "m"),
        (b'{"error": "m"}', "m"),
        (b'{"detail": [1]}', '{"detail": [1]}'),
        (b"plain\n", "plain"),
        (b"", ""),
    ],
)
def test_the_reason_is_found_in_an_error_body(raw, reason):
    assert bodies.reason_in(raw) == reason


@pytest.mark.parametrize(
    ("raw", "trouble"),
    [
        (b'{"choices": [{"finish_reason": "length"}]}', None),
        (b'{"choices": [{"finish_reason": "stop"}, {"finish_reason": "abort"}]}', "'abort'"),
        (b'{"choices": [{"finish_reason": "error"}]}', "'error'"),
        (b'{"error": {"message": "m"}}', "m"),
        (b"[]", "[]"),
        (b"<html>", "not JSON"),
        (b'{"choices": null}', None),
    ],
)
def test_a_prefill_answer_is_checked(raw, trouble):
    found = bodies.unfinished_prefill(raw)
    assert found is None if trouble is None else trouble in found


@pytest.mark.parametrize("deep", [50, 1000, 5000])
def test_a_body_can_be_read_and_written_again_or_is_refused_in_words(deep):
    raw = b'{"prompt": "p", "x": ' + b"[" * deep + b"]" * deep + b"}"
    if deep < bodies.MOST_NESTED:
        assert bodies.local_body(bodies.parse(raw)) == raw.replace(b": ", b":").replace(b", ", b",")
    else:
        with pytest.raises(bodies.BadBody, match=r"nested|recursion"):
            bodies.parse(raw)


def test_many_brackets_beside_each_other_are_not_deep():
    assert bodies.parse(b'{"prompt": "' + b"[{" * 500 + b'", "x": [' + b"[]," * 500 + b"1]}")
