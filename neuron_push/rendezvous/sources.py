"""Which prompts are here: found by what a registration may call them."""

from __future__ import annotations

from collections.abc import Iterator

from neuron_push.commands import Compute, Layers, Settle
from neuron_push.protocol import Match
from neuron_push.rendezvous.links import Link
from neuron_push.rendezvous.producer import Source, extend

# Dispatches that ended here and are kept.
MOST_EPITAPHS = 4096


class Sources:
    """The prompts of this rank, by number and by what a registration may call them."""

    def __init__(self) -> None:
        self._by_number: dict[int, Source] = {}
        self._by_key: dict[tuple[str, ...], dict[int, Source]] = {}
        # How dispatches ended here, so that a late registration hears it.
        self._epitaphs: dict[tuple[str, ...], str] = {}
        self._computing: list[Source] = []  # whose layers settle one by one, until the step's end

    def __iter__(self) -> Iterator[Source]:
        return iter(list(self._by_number.values()))

    def __len__(self) -> int:
        return len(self._by_number)

    def get(self, number: int) -> Source | None:
        return self._by_number.get(number)

    def add(self, source: Source) -> None:
        self._by_number[source.number] = source
        for key in keys(source.match):
            self._by_key.setdefault(key, {})[source.number] = source

    def compute(self, command: Compute) -> None:
        """A step computes more tokens of a source, whose layers settle one by one."""
        source = self.get(command.source)
        if source is None or source.gone:
            return  # what is pinned goes with the Settle that follows
        for group, (first, ids) in enumerate(zip(command.first, command.blocks, strict=True)):
            extend(source.blocks, group, first, ids)
        source.pin, source.computing, source.step = command.pin, command.stop, command.step
        self._computing.append(source)

    def reach(self, command: Layers) -> list[Source]:
        """Parts of the layers are settled of what a step computes; the sources that gain."""
        computed = [source for source in self._computing if source.step == command.step]
        for source in computed:
            for part in range(1, command.parts + 1):
                source.reached[part] = max(source.reached.get(part, 0), source.computing)
        return [source for source in computed if not source.gone]

    def settle(self, command: Settle) -> Source | None:
        """More tokens are settled; the source, or None if no WRITE reads what is pinned."""
        source = self.get(command.source)
        if source in self._computing:
            self._computing.remove(source)
        if source is None or (source.gone and source.pin != command.pin):
            return None
        if not source.gone:
            for group, (first, ids) in enumerate(zip(command.first, command.blocks, strict=True)):
                extend(source.blocks, group, first, ids)
            source.settled = max(source.settled, command.stop)
            source.pin = command.pin
            source.last = source.last or command.last
        return source

    def hide(self, source: Source) -> None:
        """No registration finds it any more."""
        for key in keys(source.match):
            entries = self._by_key.get(key, {})
            entries.pop(source.number, None)
            if not entries:
                self._by_key.pop(key, None)

    def remove(self, source: Source) -> bool:
        """Forget it; False if that was done before."""
        self.hide(source)
        return self._by_number.pop(source.number, None) is not None

    def find(self, wanted: Match, link: Link) -> Source | None:
        """Among equal prompts, prefer the same request, then one this rank does not use yet."""
        found = [
            source
            for key in keys(wanted)
            for source in self._by_key.get(key, {}).values()
            if matches(wanted, source.match)
        ]
        return min(
            found,
            key=lambda source: (
                source.match.base != wanted.base,
                (link.engine, link.rank) in source.served
                or any(other.link is link for other in source.sendings),
                source.number,
            ),
            default=None,
        )

    def remember(self, source: Source, reason: str) -> None:
        """Keep how a dispatch ended; only router-given ids are unique enough for that."""
        if source.match.transfer:
            self._epitaphs[keys(source.match)[0]] = reason
            while len(self._epitaphs) > MOST_EPITAPHS:
                del self._epitaphs[next(iter(self._epitaphs))]

    def epitaph(self, wanted: Match) -> str | None:
        """How the dispatch that a registration names ended here, if that is known."""
        known = [key for key in keys(wanted) if key in self._epitaphs]
        return self._epitaphs[known[0]] if known else None


def keys(match: Match) -> list[tuple[str, ...]]:
    """Index keys of a prompt: by dispatch, and by request id."""
    digest = match.fingerprint.hex()
    named: list[tuple[str, ...]] = []
    if match.transfer:
        named.append(("transfer", match.transfer, digest))
    if match.base:
        named.append(("base", match.base, digest))
    return named


def matches(wanted: Match, offered: Match) -> bool:
    """Whether a registration means this prompt.

    The router's id decides if both legs carry one, so that a retry never meets the prompt of
    an earlier dispatch; else the request id does. The prompt itself must be the same.
    """
    if (wanted.fingerprint, wanted.tokens) != (offered.fingerprint, offered.tokens):
        return False
    if wanted.transfer and offered.transfer:
        return wanted.transfer == offered.transfer
    return bool(wanted.base) and wanted.base == offered.base
