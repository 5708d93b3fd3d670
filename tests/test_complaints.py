"""A peer cannot fill a log."""

from __future__ import annotations

import logging

from neuron_push.transfer.complaints import BURST, RATE, Complaints

logger = logging.getLogger("complaints")


def test_a_burst_is_written_and_the_rest_of_a_flood_is_counted(caplog):
    now = 0.0
    complaints = Complaints(logger, lambda: now)
    for number in range(10 * BURST):
        complaints.warn("message %d", number)
    assert [record.getMessage() for record in caplog.records] == [
        f"message {number}" for number in range(BURST)
    ]
    caplog.clear()
    now = 1 / RATE
    complaints.warn("the next")
    assert [record.getMessage() for record in caplog.records] == [
        f"{9 * BURST} more warnings were not written",
        "the next",
    ]


def test_what_comes_seldom_is_always_written(caplog):
    now = 0.0
    complaints = Complaints(logger, lambda: now)
    for number in range(5 * BURST):
        now = number / RATE
        complaints.warn("now and then")
    assert len(caplog.records) == 5 * BURST
