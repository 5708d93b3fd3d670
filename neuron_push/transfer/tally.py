"""Counts and measurements of the transfer thread, taken by the main loop once per step."""

from __future__ import annotations

import threading

# Measurements kept between two looks of the main loop; more are summed but not kept.
MOST_SAMPLES = 4096

Snapshot = tuple[dict[str, dict[str, float]], dict[str, list[float]]]


class Tally:
    """Counters by name and label, and samples by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counters: dict[str, dict[str, float]] = {}
        self._samples: dict[str, list[float]] = {}
        self.dirty = False  # read without the lock: a step with nothing to take stays cheap

    def add(self, name: str, value: float = 1.0, label: str = "") -> None:
        """Count; names ending in "_seconds" or "_size" are measurements."""
        with self._lock:
            if name.endswith(("_seconds", "_size")):
                samples = self._samples.setdefault(name, [])
                if len(samples) < MOST_SAMPLES:
                    samples.append(value)
            else:
                labels = self._counters.setdefault(name, {})
                labels[label] = labels.get(label, 0.0) + value
            self.dirty = True

    def take(self) -> Snapshot:
        """Everything since the last call: ({counter: {label: total}}, {measurement: values})."""
        with self._lock:
            taken = self._counters, self._samples
            self._counters, self._samples = {}, {}
            self.dirty = False
        return taken
