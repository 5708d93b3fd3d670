"""`kv_transfer_params`, as proxies for vLLM's push connector write them, checked.

Whatever a client sends ends in a value or in a `ParamsError` that says what was wrong; it
never stops an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from neuron_push.errors import NeuronPushError
from neuron_push.protocol import MAX_TEXT, Address

# A router's budget for one request may not exceed a day.
MOST_PATIENCE_MS = 86_400_000


class ParamsError(NeuronPushError):
    """The request's kv_transfer_params cannot be used; the text says why."""


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """This engine computes the prompt and hands it over."""

    transfer: str


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """Another engine computes the prompt; its KV is pushed here."""

    transfer: str
    prefill: Address
    engine: str  # expected engine id, or ""
    request: str  # the prefill engine's request id, or ""
    patience: float | None  # seconds, or None for the configured default


Leg = PrefillLeg | DecodeLeg


def parse(params: Mapping[str, Any] | None, role: str) -> Leg | None:
    """The leg that a request is; None for a request without KV transfer.

    `role` is vLLM's kv_role. Raises ParamsError.
    """
    if not params:
        return None
    if not isinstance(params, Mapping):
        raise ParamsError(f"kv_transfer_params is a {type(params).__name__}, not an object")
    decode, prefill = _flag(params, "do_remote_prefill"), _flag(params, "do_remote_decode")
    if decode and prefill:
        raise ParamsError("do_remote_prefill and do_remote_decode are both set; a leg is one")
    if prefill:
        if role == "kv_consumer":
            raise ParamsError("do_remote_decode was sent to a decode engine (kv_consumer)")
        return PrefillLeg(_text(params, "transfer_id"))
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
    )


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
