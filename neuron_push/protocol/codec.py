"""Messages to frames and back; what a peer sends is checked here."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from neuron_push.errors import PeerError
from neuron_push.limits import LIMITS, Limits
from neuron_push.protocol.limits import (
    MAGIC,
    MAX_DIGEST,
    MAX_PARTS,
    MAX_PIECE,
    MAX_TEXT,
    VERSION,
)
from neuron_push.protocol.message import Message
from neuron_push.protocol.notifications import (
    Done,
    Grant,
    Kept,
    Lend,
    Need,
    Notification,
    Register,
    Return,
)
from neuron_push.protocol.sidechannel import EngineInfo, SideChannelMessage

_encoder = msgspec.msgpack.Encoder()
_side_channel_decoder = msgspec.msgpack.Decoder(SideChannelMessage)
_notification_decoder = msgspec.msgpack.Decoder(Notification)
_HEADER: Final = MAGIC + bytes([VERSION])


def encode(message: Message) -> bytes:
    """Frame one message for either channel."""
    return _HEADER + _encoder.encode(message)


def decode_side_channel(frame: bytes, limits: Limits = LIMITS) -> SideChannelMessage:
    """Parse one side-channel frame.

    Raises PeerError, saying what was wrong, for anything that is not a well-formed message of
    this version within the limits.
    """
    message: SideChannelMessage = _decode(
        frame, limits.side_channel, "side_channel", _side_channel_decoder
    )
    if isinstance(message, EngineInfo) and len(message.ranks) > limits.ranks:
        raise PeerError(
            f"EngineInfo lists {len(message.ranks)} ranks; limits.ranks is {limits.ranks}"
        )
    return message


def decode_notification(frame: bytes, limits: Limits = LIMITS) -> Notification:
    """Parse one NIXL notification; raises PeerError as `decode_side_channel` does."""
    message: Notification = _decode(
        frame, limits.notification, "notification", _notification_decoder
    )
    if isinstance(message, Register):
        _check_register(message, limits)
    elif isinstance(message, Need | Grant | Return) and not 0 < message.piece <= MAX_PIECE:
        raise PeerError(f"{type(message).__name__} names piece {message.piece}")
    elif isinstance(message, Lend) and len(message.blocks) > limits.groups:
        raise PeerError(
            f"Lend lists {len(message.blocks)} groups; limits.groups is {limits.groups}"
        )
    elif isinstance(message, Done):
        _check_done(message)
    if isinstance(message, Done | Kept) and len(message.digest) > MAX_DIGEST:
        kind = type(message).__name__
        raise PeerError(f"{kind} carries a digest of {len(message.digest)} bytes")
    return message


def clip(text: str) -> str:
    """Shorten a text to what a message may carry."""
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 3] + "..."


def _decode(frame: bytes, most: int, name: str, decoder: msgspec.msgpack.Decoder[Any]) -> Any:
    if len(frame) > most:
        raise PeerError(f"message of {len(frame)} bytes; limits.{name} is {most}")
    if frame[:2] != MAGIC:
        raise PeerError(f"not a neuron-push message: starts with {frame[:4]!r}")
    if len(frame) < 3 or frame[2] != VERSION:
        seen = frame[2] if len(frame) > 2 else "none"
        raise PeerError(
            f"protocol version {seen} is not {VERSION}: upgrade the older of the two engines"
        )
    try:
        return decoder.decode(memoryview(frame)[3:])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PeerError(f"malformed message: {error}") from None


def _check_done(message: Done) -> None:
    if (message.part or message.parts) and not 1 <= message.part <= message.parts <= MAX_PARTS:
        raise PeerError(f"Done names part {message.part} of {message.parts}")
    if not 0 <= message.start < message.stop:
        raise PeerError(f"Done names the empty or negative range {message.start}..{message.stop}")


def _check_register(message: Register, limits: Limits) -> None:
    texts = (message.match.transfer, message.match.base)
    if any(len(text) > MAX_TEXT for text in texts) or len(message.match.fingerprint) > MAX_DIGEST:
        raise PeerError(f"Register carries an identifier longer than {MAX_TEXT}")
    if not 0 <= message.start <= message.stop <= message.match.tokens:
        raise PeerError(
            f"Register asks for tokens {message.start}..{message.stop} of {message.match.tokens}"
        )
    numbers = (message.attempt, message.link, message.patience_ms)
    if len(message.blocks) > limits.groups or min(numbers) < 0:
        raise PeerError("Register has a negative number or more groups than limits.groups")
