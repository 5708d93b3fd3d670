"""Counts and measurements of the transfer thread, taken by the main loop once per step."""

from __future__ import annotations

import threading
from collections import defaultdict

# Measurements kept between two looks of the main loop; more are summed but not kept.
MOST_SAMPLES = 4096

Snapshot = tuple[dict[str, dict[str, float]], dict[str, list[float]]]


class Tally:
    """Counters by name and label, and samples by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        self._samples: dict[str, list[float]] = defaultdict(list)
        self.dirty = False  # read without the lock: a step with nothing to take stays cheap

    def add(self, name: str, value: float = 1.0, label: str = "") -> None:
        """Count; names ending in "_seconds" or "_size" are measurements."""
        with self._lock:
            if name.endswith(("_seconds", "_size")):
                if len(self._samples[name]) < MOST_SAMPLES:
                    self._samples[name].append(value)
            else:
                self._counters[name][label] += value
            self.dirty = True

    def take(self) -> Snapshot:
        """Everything since the last call: ({counter: {label: total}}, {measurement: values})."""
        with self._lock:
            counters = {name: dict(labels) for name, labels in self._counters.items()}
            samples = dict(self._samples)
            self._counters.clear()
            self._samples.clear()
            self.dirty = False
        return counters, samples
