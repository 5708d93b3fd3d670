"""What each leg of a dispatch says, and what a client is told when one fails. All pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec

from neuron_push.protocol import MAX_TEXT, Address, EngineInfo

Body = dict[str, Any]

# Fields that only shape the output. The prefill leg's output is thrown away, and some of them
# would be refused beside one token (min_tokens, stream_options) or cost work (log-probabilities).
# Whatever shapes the prompt stays: both engines must see the same tokens.
OUTPUT_ONLY: Final = frozenset(
    {
        "best_of",
        "echo",
        "logprobs",
        "max_completion_tokens",
        "min_tokens",
        "prompt_logprobs",
        "return_token_ids",
        "return_tokens_as_token_ids",
        "stop",
        "stop_token_ids",
        "stream_options",
        "top_logprobs",
        "use_beam_search",
    }
)


# How deep a body may be nested. Schemas of tools are a few dozen deep; what is much deeper could be
# read and then not be written again within the interpreter's recursion limit.
MOST_NESTED: Final = 256


class BadBody(ValueError):
    """The client's body cannot be dispatched; the text says why."""


def parse(raw: bytes) -> Body:
    """The client's JSON object, without its kv_transfer_params.

    These name blocks and addresses inside the fleet; whoever sets them steers engines, so only
    the router does.
    """
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadBody(f"the body is not valid JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadBody(f"the body must be a JSON object, not {type(body).__name__}")
    body.pop("kv_transfer_params", None)
    if raw.count(b"[") + raw.count(b"{") > MOST_NESTED:
        _check_depth(body)
    return body


def _check_depth(body: Body) -> None:
    level: list[Any] = [body]
    for _ in range(MOST_NESTED):
        values = (v for each in level for v in (each.values() if isinstance(each, dict) else each))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise BadBody(f"the body is nested deeper than {MOST_NESTED} levels")


def new_transfer_id() -> str:
    """A name for one dispatch. Never used twice, so that a retry cannot match an older WRITE."""
    return uuid.uuid4().hex


def request_id(offered: str | None) -> str:
    """The client's own request id if it is fit to travel in a header, else a fresh one."""
    if offered and len(offered) <= MAX_TEXT // 2 and offered.isascii() and offered.isprintable():
        return offered
    return uuid.uuid4().hex


def prefill_body(
    body: Mapping[str, Any],
    chat: bool,
    transfer_id: str,
    deadline: float | None = None,
    mode: Literal["push", "pull"] = "push",
) -> bytes:
    """The leg that computes the prompt and one token, and pushes it or says where it is."""
    leg = {name: value for name, value in body.items() if name not in OUTPUT_ONLY}
    leg["max_tokens"] = 1
    if chat:
        leg["max_completion_tokens"] = 1
    # Prefill always ends by length, even where its one token is a stop token.
    leg |= {"n": 1, "stream": False, "ignore_eos": True}
    leg["kv_transfer_params"] = {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
        "transfer_id": transfer_id,
        "transfer_mode": mode,
    }
    leg["kv_transfer_params"] |= _budget(deadline)
    return msgspec.json.encode(leg)


def decode_body(
    body: Mapping[str, Any],
    prefill: EngineInfo,
    address: Address,
    request: str,
    transfer_id: str,
    deadline: float | None = None,
) -> bytes:
    """The leg that receives the prompt's KV from the engine at `address` and answers.

    `deadline` is how many seconds the KV may take; None leaves that to the decode engine.
    """
    leg = dict(body)
    params: Body = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": prefill.engine,
        "remote_host": address.host,
        "remote_port": address.port,
        "tp_size": prefill.tensor_parallel,
        "pp_size": prefill.pipeline_parallel,
        "remote_request_id": request,
        "transfer_id": transfer_id,
    }
    leg["kv_transfer_params"] = params | _budget(deadline)
    return msgspec.json.encode(leg)


def pull_body(
    body: Mapping[str, Any], params: Mapping[str, Any], deadline: float | None = None
) -> bytes:
    """The leg that READs a prompt's KV from where the prefill engine's answer says it is."""
    return msgspec.json.encode({**body, "kv_transfer_params": {**params, **_budget(deadline)}})


def local_body(body: Mapping[str, Any]) -> bytes:
    """A request that one engine serves alone."""
    return msgspec.json.encode(body)


def canary_body(model: str, prompt: str) -> Body:
    """The shortest request that needs a transfer."""
    return {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": False}


def _budget(deadline: float | None) -> Body:
    return {} if deadline is None else {"deadline_ms": max(1, round(deadline * 1000))}


def coordinates(raw: bytes) -> Body | None:
    """Where a prefill engine says that a prompt's KV can be read; None if it does not say."""
    try:
        params = msgspec.json.decode(raw).get("kv_transfer_params")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
        return None
    return params if isinstance(params, dict) and params.get("remote_block_ids") else None


def first_token(raw: bytes) -> bool:
    """Whether an answer carries a token: what a canary is sent for."""
    try:
        choices = msgspec.json.decode(raw).get("choices")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, AttributeError):
        return False
    choice = choices[0] if isinstance(choices, list) and choices else None
    return isinstance(choice, dict) and choice.get("finish_reason") in ("length", "stop")


def error_body(status: int, message: str, kind: str, **details: Any) -> bytes:
    """An error in the shape that OpenAI clients expect."""
    error = {"message": message, "type": kind, "param": None, "code": status, **details}
    return msgspec.json.encode({"error": error})


def reason_in(raw: bytes, limit: int = 500) -> str:
    """The readable part of an engine's error body."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw[:limit].decode(errors="replace").strip()
    for path in (("error", "message"), ("message",), ("detail",), ("error",)):
        found: Any = body
        for name in path:
            found = found.get(name) if isinstance(found, dict) else None
        if isinstance(found, str):
            return found[:limit]
    return raw[:limit].decode(errors="replace").strip()


def unfinished_prefill(raw: bytes) -> str | None:
    """Why a 200 of the prefill leg is no success, or None. Engines report aborts that way."""
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return "its answer is not JSON"
    if not isinstance(body, dict) or body.get("error"):
        return reason_in(raw) or "its answer is an error"
    choices = body.get("choices")
    for choice in choices if isinstance(choices, list) else []:
        outcome = choice.get("finish_reason") if isinstance(choice, dict) else None
        if outcome in ("abort", "error"):
            return f"its request ended with finish_reason {outcome!r}"
    return None
