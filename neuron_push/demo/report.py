"""What the demo found: figures, a verdict with reasons, a table and a JSON object. All pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from neuron_push.demo.load import Reply

USAGE = "vllm:kv_cache_usage_perc"
PINNED = "neuron_push_pinned_blocks"


class Samples:
    """One reading of an engine's /metrics."""

    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over every series of that name with those labels; None when there is none."""
        found = [
            sample.value
            for sample in self._samples
            if sample.name == name and labels.items() <= sample.labels.items()
        ]
        return sum(found) if found else None

    def by(self, name: str, label: str) -> dict[str, int]:
        """Totals of a counter per value of one label."""
        found: dict[str, int] = {}
        for sample in self._samples:
            if sample.name == name and label in sample.labels:
                value = sample.labels[label]
                found[value] = found.get(value, 0) + int(sample.value)
        return found

    def in_use(self) -> str:
        """What this engine still holds, or why that is not known; empty when it holds nothing."""
        held = []
        for name in (USAGE, PINNED):
            value = self.total(name)
            if value is None:
                held.append(f"{name} is not reported")
            elif value:
                held.append(f"{name} is {value:g}")
        return ", ".join(held)


@dataclass(frozen=True)
class Expectation:
    """What was asked for, and what that must have moved."""

    prompt_tokens: int
    output_tokens: int
    kv_bytes_per_token: int
    block_size: int

    @property
    def least_bytes(self) -> int:
        """Per prompt; its last token may be left for the decode engine to compute."""
        return (self.prompt_tokens - 1) * self.kv_bytes_per_token


@dataclass(frozen=True)
class Moved:
    """What the engines' counters say of the transfers."""

    bytes_pushed: int
    copies: int
    transfer_seconds_mean: float
    outcomes: Mapping[str, int]
    computed_by_decode: int | None

    @classmethod
    def between(cls, prefill: Samples, decode_before: Samples, decode_after: Samples) -> Self:
        """From P at the end, and D before and after the prompts went through the router."""
        count = prefill.total("neuron_push_transfer_seconds_count") or 0
        seconds = prefill.total("neuron_push_transfer_seconds_sum") or 0.0
        computed = [
            reading.total("vllm:prompt_tokens_by_source_total", source="local_compute")
            for reading in (decode_before, decode_after)
        ]
        before, after = computed
        known = before is not None and after is not None
        return cls(
            bytes_pushed=int(prefill.total("neuron_push_bytes_total") or 0),
            copies=int(prefill.total("neuron_push_copies_total") or 0),
            transfer_seconds_mean=seconds / count if count else 0.0,
            outcomes=prefill.by("neuron_push_sends_total", "outcome"),
            computed_by_decode=int((after or 0) - (before or 0)) if known else None,
        )


@dataclass(frozen=True)
class Result:
    """Everything a run measured."""

    expected: Expectation
    alone: Sequence[Reply]
    pushed: Sequence[Reply]
    moved: Moved
    # Engine name -> what it holds at the end; empty text for nothing.
    held: Mapping[str, str] = field(default_factory=dict)
    tampered: bool = False
    digest: bool = False

    @property
    def token_exact(self) -> int:
        """Requests whose output equals the single engine's, token for token."""
        whole = self.expected.output_tokens
        return sum(
            not one.error and len(one.tokens) == whole and one.tokens == other.tokens
            for one, other in zip(self.pushed, self.alone, strict=True)
        )

    @property
    def wrong(self) -> int:
        """Requests that were answered with other tokens than the single engine's."""
        return sum(
            not one.error and one.tokens != other.tokens
            for one, other in zip(self.pushed, self.alone, strict=True)
        )

    def failures(self) -> list[str]:
        """Every reason why the demo did not succeed; none when it did."""
        return [*self._wrong_answers(), *self._wrong_movement(), *self._left_over()]

    def _wrong_answers(self) -> list[str]:
        found = []
        for title, replies in (("the single engine", self.alone), ("the router", self.pushed)):
            errors = [reply.error for reply in replies if reply.error]
            if errors:
                found.append(f"{len(errors)} requests to {title} failed, first: {errors[0]}")
        if self.token_exact < len(self.pushed):
            wrong = len(self.pushed) - self.token_exact
            found.append(f"{wrong} of {len(self.pushed)} outputs differ from the single engine's")
        return found

    def _wrong_movement(self) -> list[str]:
        moved, prompts = self.moved, len(self.pushed)
        least = self.expected.least_bytes * prompts
        if not moved.bytes_pushed:
            return ["nothing was pushed: the prefill engine reports no bytes"]
        found = []
        if moved.bytes_pushed < least:
            found.append(
                f"only {moved.bytes_pushed} bytes were pushed; the prompts' KV has {least}"
            )
        # Up to a partial block per prompt may be its own work.
        computed, most = moved.computed_by_decode, prompts * self.expected.block_size
        if computed is not None and computed > most:
            found.append(f"the decode engine computed {computed} prompt tokens itself")
        return found

    def _left_over(self) -> list[str]:
        return [f"{name} does not come to rest: {held}" for name, held in self.held.items() if held]

    def as_json(self) -> dict[str, Any]:
        """The object that --json prints. Times are milliseconds, sizes are bytes."""
        failures = self.failures()
        return {
            "requests": len(self.pushed),
            "token_exact": self.token_exact,
            "prompt_tokens": self.expected.prompt_tokens,
            "output_tokens": self.expected.output_tokens,
            "bytes_pushed": self.moved.bytes_pushed,
            "copies": self.moved.copies,
            "transfers": dict(self.moved.outcomes),
            "transfer_ms_mean": _ms(self.moved.transfer_seconds_mean),
            **_times("", self.pushed),
            **_times("single_engine_", self.alone),
            "tampered": self.tampered,
            "digest": self.digest,
            "wrong": self.wrong,
            "ok": not failures,
            "failures": failures,
        }

    def table(self) -> str:
        """The same for people."""
        moved, pushed, alone = self.moved, _times("", self.pushed), _times("", self.alone)
        transfers = ", ".join(f"{n} {outcome}" for outcome, n in moved.outcomes.items()) or "none"
        rows = [
            ("", "P -> D", "one engine"),
            *(
                (title, _show(pushed[name]), _show(alone[name]))
                for title, name in (
                    ("TTFT p50, ms", "ttft_ms_p50"),
                    ("TTFT p99, ms", "ttft_ms_p99"),
                    ("TPOT mean, ms", "tpot_ms_mean"),
                    ("TPOT p99, ms", "tpot_ms_p99"),
                )
            ),
            ("pushed, MiB", f"{moved.bytes_pushed / 2**20:.1f}", ""),
            ("copies", f"{moved.copies}", ""),
            ("transfers", transfers, ""),
            ("transfer mean, ms", f"{_ms(moved.transfer_seconds_mean)}", ""),
            ("token-exact", f"{self.token_exact} of {len(self.pushed)}", ""),
        ]
        return "\n".join(f"  {a:<20}{b:>16}{c:>14}".rstrip() for a, b, c in rows)


def percentile(values: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of all values do not exceed; None for none."""
    if not values:
        return None
    rank = max(1, -(-round(share * 1000) * len(values) // 1000))
    return sorted(values)[rank - 1]


def _times(prefix: str, replies: Sequence[Reply]) -> dict[str, float | None]:
    good = [reply for reply in replies if not reply.error and reply.tokens]
    first = [reply.first_token for reply in good]
    per_token = [value for reply in good if (value := reply.per_token) is not None]
    mean = sum(per_token) / len(per_token) if per_token else None
    times = {
        "ttft_ms_p50": percentile(first, 0.5),
        "ttft_ms_p99": percentile(first, 0.99),
        "tpot_ms_mean": mean,
        "tpot_ms_p99": percentile(per_token, 0.99),
    }
    return {prefix + name: None if value is None else _ms(value) for name, value in times.items()}


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
