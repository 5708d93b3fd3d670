"""Whatever a client sends as kv_transfer_params ends in a leg or in a ParamsError that says why."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neuron_push.protocol import MAX_TEXT, Address
from neuron_push.vllm.params import MOST_PATIENCE_MS, DecodeLeg, ParamsError, PrefillLeg, parse

DECODE = {"do_remote_prefill": True, "remote_host": "h", "remote_port": 5600}
ROLES = ("kv_producer", "kv_consumer", "kv_both")
NAMES = (
    "do_remote_prefill", "do_remote_decode", "transfer_id", "remote_host", "remote_port",
    "remote_engine_id", "remote_request_id", "deadline_ms", "remote_block_ids", "tp_size",
    "transfer_mode",
)  # fmt: skip

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)


def test_requests_without_transfer_are_none_of_our_business():
    for params in (None, {}, {"do_remote_prefill": False}, {"do_remote_decode": None}):
        assert parse(params, "kv_both") is None


def test_the_words_of_vllms_push_connector_are_understood():
    sent_by_proxy = {
        "do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": "e",
        "remote_request_id": "cmpl-1-0-00aabbcc", "remote_host": "10.0.0.1", "remote_port": 5601,
        "remote_block_ids": None, "tp_size": 4,
    }  # fmt: skip
    leg = parse(sent_by_proxy, "kv_consumer")
    assert leg == DecodeLeg("", Address("10.0.0.1", 5601), "e", "cmpl-1-0-00aabbcc", None)
    params = {"do_remote_decode": True, "transfer_id": "x"}
    assert parse(params, "kv_both", "push") == PrefillLeg("x", pull=False)


@pytest.mark.parametrize(
    "wrong", [{"transfer_id": "x" * 5000}, {"transfer_id": 5}, {"do_remote_prefill": 0}]
)
def test_a_plain_prefill_leg_is_held_to_the_same_rules(wrong):
    plain = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "x"}
    assert parse(plain, "kv_both") == PrefillLeg("x", pull=True)
    with pytest.raises(ParamsError, match=f"{next(iter(wrong))} is"):
        parse({**plain, **wrong}, "kv_both")
    with pytest.raises(ParamsError, match="decode engine"):
        parse(plain, "kv_consumer")


FINISHED = {**DECODE, "remote_block_ids": [[4, 5], []], "remote_engine_id": "e", "tp_size": 1}
UNFINISHED = [None, [], (), [[]], [(), []]]


@pytest.mark.parametrize("ids", [[4, 5], [[4, 5]], [[], [7]], ((4,),)])
def test_a_decode_leg_that_carries_block_ids_reads(ids):
    assert parse({**DECODE, "remote_block_ids": ids}, "kv_both").pull
    assert parse({**DECODE, "remote_block_ids": ids}, "kv_both", "pull").pull


@pytest.mark.parametrize("ids", UNFINISHED)
def test_a_decode_leg_without_block_ids_is_pushed_to(ids):
    assert not parse({**DECODE, "remote_block_ids": ids}, "kv_both").pull
    assert not parse({**DECODE, "remote_block_ids": ids}, "kv_both", "push").pull


def test_what_a_request_says_of_its_mode_decides_over_block_ids():
    assert parse({**DECODE, "transfer_mode": "pull"}, "kv_both").pull
    assert not parse({**FINISHED, "transfer_mode": "push"}, "kv_both").pull


@pytest.mark.parametrize(("params", "mode", "pull"), [
    ({}, "auto", True), ({}, "push", False), ({}, "pull", True),
    ({"transfer_mode": "push"}, "auto", False), ({"transfer_mode": "pull"}, "auto", True),
])  # fmt: skip
def test_a_prefill_leg_names_its_blocks_unless_it_is_to_push(params, mode, pull):
    leg = parse({"do_remote_decode": True, **params}, "kv_both", mode)
    assert leg == PrefillLeg("", pull)


@pytest.mark.parametrize(("params", "mode", "says"), [
    (FINISHED, "push", 'set to "mode": "push", but the request carries the block ids'),
    ({**DECODE, "transfer_mode": "pull"}, "push", 'set to "mode": "push"'),
    (DECODE, "pull", 'set to "mode": "pull", but the request carries no block ids'),
    ({**FINISHED, "transfer_mode": "push"}, "pull", 'set to "mode": "pull"'),
    ({"do_remote_decode": True, "transfer_mode": "push"}, "pull", "transfer_mode is 'push'"),
    ({"do_remote_decode": True, "transfer_mode": "pull"}, "push", "transfer_mode is 'pull'"),
    ({**DECODE, "transfer_mode": "shove"}, "auto", "transfer_mode is 'shove'"),
    ({**DECODE, "remote_block_ids": 7}, "auto", "remote_block_ids is 7, not a list"),
    ({**DECODE, "remote_block_ids": "44"}, "auto", "remote_block_ids is '44', not a list"),
])  # fmt: skip
def test_a_request_that_contradicts_the_mode_is_refused_in_words(params, mode, says):
    with pytest.raises(ParamsError) as error:
        parse(params, "kv_both", mode)
    assert says in str(error.value)


def test_a_routers_budget_becomes_seconds():
    leg = parse({**DECODE, "deadline_ms": 1500}, "kv_both")
    assert isinstance(leg, DecodeLeg)
    assert leg.patience == 1.5


@pytest.mark.parametrize(
    ("params", "role", "says"),
    [
        ([1], "kv_both", "list, not an object"),
        ("text", "kv_both", "str, not an object"),
        ({**DECODE, "do_remote_decode": True}, "kv_both", "both set"),
        ({"do_remote_prefill": "true"}, "kv_both", "do_remote_prefill is 'true', not true or"),
        ({"do_remote_decode": 1}, "kv_both", "do_remote_decode is 1"),
        ({"do_remote_decode": True}, "kv_consumer", "decode engine (kv_consumer)"),
        (DECODE, "kv_producer", "prefill engine (kv_producer)"),
        ({"do_remote_prefill": True, "remote_port": 1}, "kv_both", "remote_host is missing"),
        ({**DECODE, "remote_host": 7}, "kv_both", "remote_host is 7"),
        ({"do_remote_prefill": True, "remote_host": "h"}, "kv_both", "remote_port is missing"),
        ({**DECODE, "remote_port": 0}, "kv_both", "remote_port is 0"),
        ({**DECODE, "remote_port": 65_536}, "kv_both", "1 to 65535"),
        ({**DECODE, "remote_port": "5600"}, "kv_both", "remote_port is '5600'"),
        ({**DECODE, "remote_port": 5600.0}, "kv_both", "remote_port is 5600.0"),
        ({**DECODE, "remote_port": True}, "kv_both", "remote_port is True"),
        ({**DECODE, "transfer_id": 5}, "kv_both", "transfer_id is 5"),
        ({**DECODE, "transfer_id": "x" * (MAX_TEXT + 1)}, "kv_both", "transfer_id"),
        ({**DECODE, "remote_engine_id": ["e"]}, "kv_both", "remote_engine_id"),
        ({**DECODE, "remote_request_id": {}}, "kv_both", "remote_request_id"),
        ({**DECODE, "deadline_ms": 0}, "kv_both", "deadline_ms is 0"),
        ({**DECODE, "deadline_ms": MOST_PATIENCE_MS + 1}, "kv_both", "deadline_ms"),
        ({**DECODE, "deadline_ms": "soon"}, "kv_both", "deadline_ms is 'soon'"),
    ],
)
def test_what_is_wrong_is_said(params, role, says):
    with pytest.raises(ParamsError) as error:
        parse(params, role)
    assert says in str(error.value)
    assert len(str(error.value)) < 300


@settings(max_examples=300, deadline=None)
@given(
    params=st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=5), values) | values,
    role=st.sampled_from(ROLES),
)
def test_arbitrary_json_never_raises_anything_else(params, role):
    try:
        leg = parse(params, role)
    except ParamsError as error:
        assert str(error)
    else:
        assert leg is None or isinstance(leg, PrefillLeg | DecodeLeg)
