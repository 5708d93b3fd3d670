"""What a worker has seen, as files: wrong bytes line by line, and a summary that stays current.

<engine>-<rank>.wrong.jsonl     one line per wrong row described
<engine>-<rank>.json            the summary, rewritten as a whole
<engine>-<rank>.moments.jsonl   per request, the step with its last prompt token:
                                [request, launched, ended], on the machine's monotonic clock
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from neuron_push.emulation.oracle import Reading

logger = logging.getLogger(__name__)

# The summary is at most this old while steps run, so that a killed engine leaves one.
PERIOD: Final = 0.25
MOST_LOGGED: Final = 20


@dataclass
class Summary:
    """Counts since the start."""

    steps: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    bytes_checked: int = 0
    context_tokens: int = 0
    """Tokens whose KV came from elsewhere (another engine, or the prefix cache)."""
    wrong_rows: int = 0
    modelled_seconds: float = 0.0
    own_seconds: float = 0.0
    """Processor time of filling, reading and drawing tokens."""
    late_seconds: float = 0.0
    """By how much steps ended after their modelled time."""
    writes_early: int = 0
    """WRITEs posted between the end of a step and the launch of the next."""
    writes_late: int = 0
    """WRITEs posted after that launch."""
    requests_wrong: list[str] = field(default_factory=list)


# More of its own work than this share of the modelled time, and an engine measures itself; later
# than this share, and it measures what else this machine does.
MOST_OWN_SHARE: Final = 0.2


def unfit(summary: Mapping[str, Any]) -> str:
    """Why a benchmark over this engine says nothing about the modelled one; "" if it does."""
    modelled = summary["modelled_seconds"]
    most = MOST_OWN_SHARE * modelled
    found = []
    if (own := summary["own_seconds"]) > most:
        found.append(f"spent {own:.3f} s on emulating")
    if (late := summary["late_seconds"]) > most:
        found.append(f"ended its steps {late:.3f} s late over")
    if not found:
        return ""
    return (
        f"{summary['name']} {' and '.join(found)} {modelled:.3f} s of modelled time; more than "
        f"{MOST_OWN_SHARE:.0%} distorts a benchmark"
    )


def timed(summaries: Iterable[Mapping[str, Any]]) -> list[str]:
    """Reasons not to believe durations seen over these engines; none if they may be believed.

    Engines without modelled time have nothing to distort, and nothing to measure either.
    """
    found = []
    for summary in summaries:
        if not summary["modelled_seconds"]:
            found.append(f"{summary['name']} modelled no time")
        elif why := unfit(summary):
            found.append(why)
    return found


class Reporter:
    """One rank's; used by the writer thread, but for `close`."""

    def __init__(self, folder: str, name: str) -> None:
        self.summary = Summary()
        self._folder = Path(folder) if folder else None
        self._name = name
        self._written = 0.0
        self._stale = False
        self._logged = 0
        if self._folder:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._write()

    def reading(self, requests: list[str], reading: Reading, moment: str) -> None:
        """Take in one reading; `requests` names each token's."""
        self.summary.bytes_checked += reading.nbytes
        if not reading.wrong_rows:
            return
        self.summary.wrong_rows += reading.wrong_rows
        lines = []
        for wrong in reading.examples:
            request = requests[wrong.index]
            line: dict[str, Any] = {"request": request, "moment": moment, **asdict(wrong)}
            del line["index"]
            lines.append(json.dumps(line))
            if request not in self.summary.requests_wrong[-200:]:
                self.summary.requests_wrong.append(request)
        self._log(lines, reading.wrong_rows)
        if self._folder:
            with (self._folder / f"{self._name}.wrong.jsonl").open("a") as file:
                file.write("\n".join(lines) + "\n")
        self._write()

    def step_done(self) -> None:
        """Keep the summary file current."""
        self._stale = True
        if time.monotonic() - self._written > PERIOD:
            self._write()

    def prompt_done(self, request: str, launched: float, ended: float) -> None:
        """A step has computed a request's last prompt token; on decode, that is its first step."""
        if self._folder:
            with (self._folder / f"{self._name}.moments.jsonl").open("a") as file:
                file.write(json.dumps([request, launched, ended]) + "\n")

    def idle(self) -> None:
        """Nothing has happened for a while."""
        if self._stale:
            self._write()

    def close(self) -> None:
        """The last word."""
        self._write()
        seen = self.summary
        logger.info(
            "emulation %s: %d steps, %d wrong rows, %d bytes checked, %d tokens of KV from "
            "elsewhere, WRITEs posted before the next launch: %d, after: %d, own time %.3f s of "
            "%.3f s modelled",
            self._name, seen.steps, seen.wrong_rows, seen.bytes_checked, seen.context_tokens,
            seen.writes_early, seen.writes_late, seen.own_seconds, seen.modelled_seconds,
        )  # fmt: skip

    def _log(self, lines: list[str], rows: int) -> None:
        if self._logged < MOST_LOGGED:
            self._logged += 1
            logger.error("emulation %s: %d wrong rows, such as %s", self._name, rows, lines[:1])

    def _write(self) -> None:
        self._written, self._stale = time.monotonic(), False
        if not self._folder:
            return
        text = json.dumps({"name": self._name, **asdict(self.summary)}, indent=1)
        target = self._folder / f"{self._name}.json"
        scratch = target.with_suffix(".tmp")
        scratch.write_text(text)
        os.replace(scratch, target)
