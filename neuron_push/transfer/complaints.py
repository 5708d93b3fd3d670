"""Warnings that peers can cause: as many as somebody reads, and a count of the rest."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

__all__ = ["Complaints"]

# So many at once, and so many a second in the long run.
BURST = 50
RATE = 2.0


class Complaints:
    """Logs warnings, of which a peer may cause thousands a second. Belongs to one thread."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._allowed = float(BURST)
        self._then = clock()
        self._unsaid = 0

    def warn(self, text: str, *arguments: object) -> None:
        """Log a warning, as `logging` writes it, or count it."""
        now = self._clock()
        self._allowed = min(float(BURST), self._allowed + (now - self._then) * RATE)
        self._then = now
        if self._allowed < 1:
            self._unsaid += 1
            return
        self._allowed -= 1
        if self._unsaid:
            self._logger.warning("%d more warnings were not written", self._unsaid)
            self._unsaid = 0
        self._logger.warning(text, *arguments)
