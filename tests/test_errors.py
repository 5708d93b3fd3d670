"""The exception tree: complete at the top of its module, and readable when shown."""

from __future__ import annotations

import pytest

from neuron_push import errors
from neuron_push.errors import IncompatiblePair, NeuronPushError, PeerError, Refused


def test_every_exception_is_in_the_tree_and_exported():
    defined = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert set(errors.__all__) == defined
    assert all(name in errors.__doc__ for name in defined)


def test_one_base_catches_all():
    assert all(issubclass(getattr(errors, name), NeuronPushError) for name in errors.__all__)


def test_a_refusal_keeps_the_reason_and_names_the_peer():
    refusal = Refused("older protocol", peer="engine-1")
    assert refusal.reason == "older protocol"
    assert str(refusal) == "engine-1: older protocol"
    assert str(PeerError("malformed")) == "malformed"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (IncompatiblePair("no way"), "no way"),
        (IncompatiblePair(differences=["head size 64 != 128"]), "head size 64 != 128"),
        (IncompatiblePair("refused", differences=["a", "b"]), "refused: a; b"),
    ],
)
def test_an_incompatible_pair_lists_what_differs(error, text):
    assert str(error) == text
