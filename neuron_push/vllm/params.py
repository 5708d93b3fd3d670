"""`kv_transfer_params`, as proxies for vLLM's push and pull connectors write them, checked.

Whatever a client sends ends in a value or in a `ParamsError` that says what was wrong; it
never stops an engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import Meta

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
Text = Annotated[str, Meta(max_length=MAX_TEXT)]


class _Said(msgspec.Struct):
    """What either leg may say, by its name in the request."""

    do_remote_prefill: bool | None = None
    do_remote_decode: bool | None = None
    transfer_id: Text | None = None
    transfer_mode: Literal["push", "pull"] | None = None


class _SaidByDecode(_Said):
    """What a decode leg may say besides."""

    remote_host: Text | None = None
    remote_port: Annotated[int, Meta(ge=1, le=65_535)] | None = None
    remote_engine_id: Text | None = None
    remote_request_id: Text | None = None
    deadline_ms: Annotated[int, Meta(ge=1, le=MOST_PATIENCE_MS)] | None = None
    remote_block_ids: Any = None


_TEXT: Final = f"a text of at most {MAX_TEXT} characters"
# What each field has to be, for people.
_WANTED: Final = {
    "do_remote_prefill": "true or false",
    "do_remote_decode": "true or false",
    "transfer_id": _TEXT,
    "transfer_mode": '"push" or "pull"',
    "remote_host": _TEXT,
    "remote_port": "a whole number from 1 to 65535",
    "remote_engine_id": _TEXT,
    "remote_request_id": _TEXT,
    "deadline_ms": f"a whole number from 1 to {MOST_PATIENCE_MS}",
}
_FIELD: Final = re.compile(r"at `\$\.(\w+)`$")


def parse(params: Mapping[str, Any] | None, role: str, mode: Mode = "auto") -> Leg | None:
    """The leg that a request is; None for a request without KV transfer.

    `role` is vLLM's kv_role, `mode` the engine's own setting. Raises ParamsError.
    """
    if not params:
        return None
    if type(params) is not dict and not isinstance(params, Mapping):  # the latter costs more
        raise ParamsError(f"kv_transfer_params is a {type(params).__name__}, not an object")
    if (plain := _plain_prefill_leg(params)) is not None and role != "kv_consumer":
        return PrefillLeg(plain, mode != "push")
    try:
        if params.get("do_remote_prefill"):
            return _decode_leg(msgspec.convert(params, _SaidByDecode), role, mode)
        said = msgspec.convert(params, _Said)
    except msgspec.ValidationError as error:
        raise ParamsError(_wrong(params, str(error))) from None
    if not said.do_remote_decode:
        return None
    if role == "kv_consumer":
        raise ParamsError("do_remote_decode was sent to a decode engine (kv_consumer)")
    mark = said.transfer_mode
    if mark and mode not in ("auto", mark):
        raise ParamsError(f'transfer_mode is {mark!r}, but this engine is set to "mode": "{mode}"')
    # Unless told otherwise a prefill leg's answer names its blocks.
    return PrefillLeg(said.transfer_id or "", (mark or mode) != "push")


def _plain_prefill_leg(params: Mapping[str, Any]) -> str | None:
    """The transfer of a prefill leg that says no more, as nearly all do, and nothing wrong.

    Seen without the schema, of which much is to be fetched from memory in an engine's step.
    """
    said = params.get
    other, transfer = said("do_remote_prefill"), said("transfer_id")
    if said("do_remote_decode") is not True or not (other is None or other is False):
        return None
    if type(transfer) is not str or len(transfer) > MAX_TEXT:
        return None
    return transfer if said("transfer_mode") is None else None


def _decode_leg(said: _SaidByDecode, role: str, mode: Mode) -> DecodeLeg:
    if said.do_remote_decode:
        raise ParamsError("do_remote_prefill and do_remote_decode are both set; a leg is one")
    if role == "kv_producer":
        raise ParamsError("do_remote_prefill was sent to a prefill engine (kv_producer)")
    if not said.remote_host:
        raise ParamsError("remote_host is missing: where is the prefill engine's side channel?")
    if said.remote_port is None:
        raise ParamsError(f"remote_port is missing; it must be {_WANTED['remote_port']}")
    mark, named, patience = said.transfer_mode, said.remote_block_ids, said.deadline_ms
    pull = mark == "pull" or (named is not None and mark != "push" and _names_blocks(named))
    if mode != "auto" and pull != (mode == "pull"):
        raise ParamsError(_UNWANTED[mode])
    return DecodeLeg(
        said.transfer_id or "",
        Address(said.remote_host, said.remote_port),
        said.remote_engine_id or "",
        said.remote_request_id or "",
        None if patience is None else patience / 1000,
        pull,
    )


# A leg that READs carries the block ids of a finished prefill, or says so.
_UNWANTED: Final = {
    "push": 'this engine is set to "mode": "push", but the request carries the block ids of a '
    'finished prefill: send both legs at once, or set "mode": "auto"',
    "pull": 'this engine is set to "mode": "pull", but the request carries no block ids of a '
    'finished prefill: pass on what the prefill leg answered, or set "mode": "auto"',
}


def _names_blocks(value: object) -> bool:
    """Whether there are block ids. They are a mark: what is READ is what prefill names itself."""
    if not isinstance(value, list | tuple):
        raise ParamsError(f"remote_block_ids is {_show(value)}, not a list of block ids")
    return any(bool(group) if isinstance(group, list | tuple) else True for group in value[:MOST])


def _wrong(params: Mapping[str, Any], found: str) -> str:
    """What is wrong, of what msgspec found."""
    field = _FIELD.search(found)
    if field is None or field[1] not in _WANTED:
        return f"kv_transfer_params: {found}"
    return f"{field[1]} is {_show(params.get(field[1]))}, not {_WANTED[field[1]]}"


def _show(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
