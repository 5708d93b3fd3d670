"""Messages survive the wire, and nothing else passes the decoders."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from neuron_push import protocol
from neuron_push.errors import PeerError
from neuron_push.limits import LIMITS
from neuron_push.protocol import (
    MAGIC,
    MAX_TEXT,
    VERSION,
    Address,
    Announce,
    Announced,
    BlockList,
    Done,
    EngineInfo,
    Grant,
    Hello,
    Kept,
    Match,
    Need,
    RankInfo,
    Refusal,
    Register,
    Return,
    Welcome,
    Who,
    clip,
    decode_notification,
    decode_side_channel,
    encode,
)
from neuron_push.protocol.limits import MAX_DIGEST
from tests.rendezvous.shapes import SEMANTICS, Shape

GEOMETRY = Shape(2, 2).geometry(1)
RANK = RankInfo(1, 77, Address("10.0.0.1", 5601), GEOMETRY)
INFO = EngineInfo(
    "e", 9, "producer", 4, 2, 2, 0, ("push",), SEMANTICS, (RANK,), software=(("vllm", "0.32"),)
)
SIDE_CHANNEL = [
    Who(), INFO, Announce("e", RANK, SEMANTICS), Announced(), Refusal("no"),
    Hello("e", 1, 2, 3, SEMANTICS, GEOMETRY, "e/1/2/0", b"\0\xff", ((0, 1),), 2),
    Welcome("e", 1, 2, "e/1/2/0", b"meta"),
]  # fmt: skip
DECODERS = {
    "side channel": (decode_side_channel, LIMITS.side_channel),
    "notification": (decode_notification, LIMITS.notification),
}
# What msgspec would build from its own types, within the limits that the decoder checks.
COUNT = st.integers(0, 2**63 - 1)


def registers():
    def build(attempt, link, start, more, rest, runs, patience):
        match = Match("t", "b", b"f" * 16, start + more + rest)
        return Register(attempt, link, match, start, start + more,
                        (BlockList(0, tuple(runs)),), patience)  # fmt: skip

    small = st.integers(0, 2**40)
    return st.builds(
        build, COUNT, COUNT, small, small, small, st.lists(COUNT, max_size=9), COUNT
    )  # fmt: skip


def notifications():
    own = {Register, Done, Need, Grant, Return, Kept}
    others = [kind for kind in protocol.Notification.__args__ if kind not in own]
    done = st.builds(
        lambda attempt, start, more: Done(attempt, start, start + more, 5, 6),
        COUNT, st.integers(0, 2**40), st.integers(1, 2**40),
    )  # fmt: skip
    piece = st.integers(1, 1 << 40)
    pieces = [st.builds(kind, COUNT, piece) for kind in (Need, Return)]
    grant = st.builds(Grant, COUNT, piece, COUNT)
    kept = st.builds(Kept, COUNT, COUNT, st.binary(max_size=MAX_DIGEST))
    return st.one_of(registers(), done, kept, grant, *pieces, *map(st.from_type, others))


@pytest.mark.parametrize("message", SIDE_CHANNEL, ids=lambda m: type(m).__name__)
def test_side_channel_messages_survive_the_wire(message):
    assert decode_side_channel(encode(message)) == message


SIMPLE = sorted(
    set(protocol.SideChannelMessage.__args__) - set(map(type, SIDE_CHANNEL)),
    key=lambda kind: kind.__name__,
)


@given(st.one_of(*map(st.from_type, SIMPLE)) if SIMPLE else st.just(Who()))
def test_the_other_side_channel_messages_survive_the_wire_too(message):
    try:
        frame = encode(message)
    except (OverflowError, UnicodeEncodeError):
        return
    try:
        assert repr(decode_side_channel(frame)) == repr(message)
    except PeerError as error:
        assert "limit" in str(error) or "longer" in str(error)


@given(notifications())
def test_notifications_survive_the_wire(message):
    try:
        frame = encode(message)
    except (OverflowError, UnicodeEncodeError):
        return  # no engine counts or writes like that
    assert decode_notification(frame) == message


@pytest.mark.parametrize("name", DECODERS)
@given(frame=st.binary(max_size=300))
def test_arbitrary_bytes_are_refused_and_nothing_else(name, frame):
    decode = DECODERS[name][0]
    for bytes_ in (frame, MAGIC + frame, MAGIC + bytes([VERSION]) + frame):
        try:
            decode(bytes_)
        except PeerError:
            continue


@pytest.mark.parametrize("name", DECODERS)
@given(data=st.data())
def test_damaged_messages_are_refused_or_still_messages(name, data):
    decode = DECODERS[name][0]
    pool = SIDE_CHANNEL if name == "side channel" else [data.draw(registers())]
    frame = bytearray(encode(data.draw(st.sampled_from(pool))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(frame)))
    for damaged in (bytes(frame), bytes(frame[:cut])):
        try:
            assert isinstance(decode(damaged), msgspec.Struct)
        except PeerError:
            continue


@pytest.mark.parametrize("name", DECODERS)
def test_other_versions_are_refused_by_name(name):
    frame = MAGIC + bytes([VERSION + 1]) + encode(Who())[3:]
    with pytest.raises(PeerError, match=f"version {VERSION + 1} is not {VERSION}"):
        DECODERS[name][0](frame)
    with pytest.raises(PeerError, match="version none"):
        DECODERS[name][0](MAGIC)


@pytest.mark.parametrize("name", DECODERS)
def test_oversized_frames_are_refused_unread(name):
    decode, limit = DECODERS[name]
    with pytest.raises(PeerError, match=r"limits\.(notification|side_channel) is"):
        decode(encode(Who()) + bytes(limit))


@pytest.mark.parametrize("name", DECODERS)
def test_deep_nesting_is_refused(name):
    with pytest.raises(PeerError):
        DECODERS[name][0](MAGIC + bytes([VERSION]) + b"\x91" * 100_000)


def test_messages_of_one_channel_are_refused_on_the_other():
    with pytest.raises(PeerError):
        decode_notification(encode(Who()))
    with pytest.raises(PeerError):
        decode_side_channel(encode(Done(1, 0, 4)))


MATCH = Match("t", "b", b"f", 40)
BAD = {
    "tokens beyond the prompt": Register(1, 1, MATCH, 0, 41, (), 0),
    "a negative range": Register(1, 1, MATCH, 8, 4, (), 0),
    "a negative start": Register(1, 1, MATCH, -1, 4, (), 0),
    "a negative attempt": Register(-1, 1, MATCH, 0, 4, (), 0),
    "a negative link": Register(1, -1, MATCH, 0, 4, (), 0),
    "negative patience": Register(1, 1, MATCH, 0, 4, (), -1),
    "too many groups": Register(1, 1, MATCH, 0, 4, (BlockList(0, ()),) * (LIMITS.groups + 1), 0),
    "a long identifier": Register(1, 1, Match("t" * (MAX_TEXT + 1), "", b"", 4), 0, 4, (), 0),
    "a long fingerprint": Register(1, 1, Match("t", "", b"f" * 65, 4), 0, 4, (), 0),
    "an empty Done": Done(1, 4, 4),
    "a negative Done": Done(1, -4, 4),
    "a long digest": Done(1, 0, 4, digest=b"d" * (MAX_DIGEST + 1)),
    "a long digest of a pull": Kept(1, 1, b"d" * (MAX_DIGEST + 1)),
}


@pytest.mark.parametrize("name", BAD)
def test_notifications_beyond_the_limits_are_refused(name):
    with pytest.raises(PeerError):
        decode_notification(encode(BAD[name]))


def test_an_engine_of_too_many_ranks_is_refused():
    tiny = RankInfo(0, 1, Address("h", 1), msgspec.structs.replace(GEOMETRY, groups=()))
    many = msgspec.structs.replace(INFO, ranks=(tiny,) * (LIMITS.ranks + 1))
    with pytest.raises(PeerError, match="ranks"):
        decode_side_channel(encode(many))


def test_clip_keeps_short_texts_and_shortens_long_ones():
    assert clip("short") == "short"
    assert len(clip("x" * 10_000)) == MAX_TEXT
