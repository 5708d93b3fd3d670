"""Answers of a child process over a pipe: (True, result) or (False, what went wrong)."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from neuron_push.errors import NeuronPushError


class ChildFailed(NeuronPushError):
    """A child raised, ended or did not answer."""


def answer(pipe: Connection, child: str, within: float) -> Any:
    """The next result, within so many seconds; raises ChildFailed, which names the child."""
    try:
        if not pipe.poll(within):
            raise ChildFailed(f"{child} did not answer within {within:g} s")
        good, result = pipe.recv()
    except (EOFError, ConnectionError) as error:
        raise ChildFailed(f"{child} has ended") from error
    if not good:
        raise ChildFailed(f"{child}: {result}")
    return result
