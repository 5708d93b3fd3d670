"""The bell rings once for a readable descriptor, and again only when it is armed."""

import os
from queue import Empty, SimpleQueue

import pytest

from neuron_push.transfer.bell import Bell


@pytest.fixture
def descriptor():
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    yield descriptor
    os.close(descriptor)


def test_it_rings_once_until_it_is_armed_and_stops_when_told(descriptor):
    rings = SimpleQueue()
    bell = Bell(descriptor, lambda: rings.put(None))
    with pytest.raises(Empty):
        rings.get(timeout=0.05)
    os.eventfd_write(descriptor, 1)
    rings.get(timeout=10)
    with pytest.raises(Empty):  # still readable, and nobody has looked
        rings.get(timeout=0.05)
    bell.arm()
    rings.get(timeout=10)
    os.eventfd_read(descriptor)
    bell.arm()
    with pytest.raises(Empty):
        rings.get(timeout=0.05)
    bell.close()


def test_it_stops_while_it_waits_to_be_armed(descriptor):
    rings = SimpleQueue()
    bell = Bell(descriptor, lambda: rings.put(None))
    os.eventfd_write(descriptor, 1)
    rings.get(timeout=10)
    bell.close()
    assert rings.empty()
