"""`kv_transfer_params`, as proxies for vLLM's push and pull connectors write them, checked.

Whatever a client sends ends in a value or in a `ParamsError` that says what was wrong; it
never stops an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from neuron_push.errors import NeuronPushError
from neuron_push.protocol import MAX_TEXT, Address

# Block lists that are looked at: one per KV group.
MOST = 64
# A router's budget for one request may not exceed a day.
MOST_PATIENCE_MS = 86_400_000


class ParamsError(NeuronPushError):
    """The request's kv_transfer_params cannot be used; the text says why."""


class PrefillLeg(msgspec.Struct, frozen=True):
    """This engine computes the prompt and hands it over; `pull` if its answer says from where."""

    transfer: str
    pull: bool = False


class DecodeLeg(msgspec.Struct, frozen=True):
    """Another engine computes the prompt; its KV is pushed here, or READ from there (`pull`)."""

    transfer: str
    prefill: Address
    engine: str  # expected engine id, or ""
    request: str  # the prefill engine's request id, or ""
    patience: float | None  # seconds, or None for the configured default
    pull: bool = False


Leg = PrefillLeg | DecodeLeg
Mode = Literal["auto", "push", "pull"]


def parse(params: Mapping[str, Any] | None, role: str, mode: Mode = "auto") -> Leg | None:
    """The leg that a request is; None for a request without KV transfer.

    `role` is vLLM's kv_role, `mode` the engine's own setting. Raises ParamsError.
    """
    if not params:
        return None
    if type(params) is not dict and not isinstance(params, Mapping):
        raise ParamsError(f"kv_transfer_params is a {type(params).__name__}, not an object")
    decode, prefill = _flag(params, "do_remote_prefill"), _flag(params, "do_remote_decode")
    if decode and prefill:
        raise ParamsError("do_remote_prefill and do_remote_decode are both set; a leg is one")
    if prefill:
        if role == "kv_consumer":
            raise ParamsError("do_remote_decode was sent to a decode engine (kv_consumer)")
        return PrefillLeg(_text(params, "transfer_id"), _prefill_pulls(params, mode))
    if not decode:
        return None
    if role == "kv_producer":
        raise ParamsError("do_remote_prefill was sent to a prefill engine (kv_producer)")
    host = _text(params, "remote_host")
    if not host:
        raise ParamsError("remote_host is missing: where is the prefill engine's side channel?")
    patience = params.get("deadline_ms")
    if patience is not None:
        patience = _integer(params, "deadline_ms", 1, MOST_PATIENCE_MS) / 1000
    return DecodeLeg(
        _text(params, "transfer_id"),
        Address(host, _integer(params, "remote_port", 1, 65_535)),
        _text(params, "remote_engine_id"),
        _text(params, "remote_request_id"),
        patience,
        _decode_pulls(params, mode),
    )


def _prefill_pulls(params: Mapping[str, Any], mode: Mode) -> bool:
    """Whether a prefill leg's answer names its blocks; unless told otherwise it does."""
    mark = _mark(params)
    if mark and mode not in ("auto", mark):
        raise ParamsError(f'transfer_mode is {mark!r}, but this engine is set to "mode": "{mode}"')
    return (mark or mode) != "push"


def _decode_pulls(params: Mapping[str, Any], mode: Mode) -> bool:
    """Whether a decode leg READs: it carries the block ids of a finished prefill, or says so."""
    mark = _mark(params)
    pull = mark == "pull" or (mark != "push" and _named_blocks(params))
    if pull and mode == "push":
        raise ParamsError(
            'this engine is set to "mode": "push", but the request carries the block ids of a '
            'finished prefill: send both legs at once, or set "mode": "auto"'
        )
    if not pull and mode == "pull":
        raise ParamsError(
            'this engine is set to "mode": "pull", but the request carries no block ids of a '
            'finished prefill: pass on what the prefill leg answered, or set "mode": "auto"'
        )
    return pull


def _mark(params: Mapping[str, Any]) -> Literal["", "push", "pull"]:
    value = params.get("transfer_mode")
    if value is None:
        return ""
    if value == "push" or value == "pull":
        return "push" if value == "push" else "pull"
    raise ParamsError(f'transfer_mode is {_show(value)}, not "push" or "pull"')


def _named_blocks(params: Mapping[str, Any]) -> bool:
    """Whether block ids are named. They are a mark: what is READ is what prefill names itself."""
    value = params.get("remote_block_ids")
    if value is None:
        return False
    if not isinstance(value, list | tuple):
        raise ParamsError(f"remote_block_ids is {_show(value)}, not a list of block ids")
    return any(bool(group) if isinstance(group, list | tuple) else True for group in value[:MOST])


def _flag(params: Mapping[str, Any], name: str) -> bool:
    value = params.get(name)
    if value is None or isinstance(value, bool):
        return bool(value)
    raise ParamsError(f"{name} is {_show(value)}, not true or false")


def _text(params: Mapping[str, Any], name: str) -> str:
    value = params.get(name)
    if value is None:
        return ""
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise ParamsError(f"{name} is {_show(value)}, not a text of at most {MAX_TEXT} characters")
    return value


def _integer(params: Mapping[str, Any], name: str, least: int, most: int) -> int:
    value = params.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        shown = "missing" if value is None else f"{_show(value)}"
        raise ParamsError(f"{name} is {shown}; it must be a whole number from {least} to {most}")
    return value


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
