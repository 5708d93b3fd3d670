"""A finished prompt is reported sent once, when it is quiet and its request has left."""

import pytest

from neuron_push.vllm.handovers import Handovers


@pytest.fixture
def found():
    made = Handovers()
    made.add(5, "p")
    return made


def test_quiet_first(found):
    assert found.ended(5) == ""
    assert found.left({"p", "another"}) == ["p"]
    assert not found
    assert found.left({"p"}) == []


def test_left_first(found):
    assert found.left({"p"}) == []
    assert found.ended(5) == "p"
    assert not found
    assert found.ended(5) is None


def test_other_pins_are_none_of_these(found):
    assert found.ended(6) is None
    assert found.left({"another"}) == []
    assert found


@pytest.mark.parametrize("quiet", [True, False])
def test_what_is_taken_back_is_told_as_any_other_pin(found, quiet):
    if quiet:
        assert found.ended(5) == ""
    assert found.take_back(5) is quiet
    assert found.left({"p"}) == []
    assert found.ended(5) is None
    assert not found
    assert found.take_back(5) is False


def test_a_request_may_be_handed_over_again_under_another_pin(found):
    found.ended(5)
    found.take_back(5)
    found.add(7, "p")
    assert found.left({"p"}) == []
    assert found.ended(7) == "p"
