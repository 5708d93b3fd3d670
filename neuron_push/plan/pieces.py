"""The smallest runs that a pair of groups has in common, and the reasons why it has none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from neuron_push.errors import IncompatiblePair, NeedsStaging
from neuron_push.geometry import Group, Plane

__all__ = ["Pieces", "Run", "Steps"]

NOUNS = {"k": "K", "v": "V", "latent": "the latent KV", "state": "the state"}


class Steps(NamedTuple):
    """Bytes from page to page and from token to token, on both sides; token steps 0 in spans."""

    source_page: int
    source_token: int
    destination_page: int
    destination_token: int


class Run(NamedTuple):
    """Bytes that are contiguous on both sides, at token 0 of page 0. Sorts into joining order."""

    steps: Steps
    source_region: int
    destination_region: int
    source: int
    destination: int
    length: int
    whole_page: bool  # cannot be cut by token
    name: str  # of its first plane, for refusals


@dataclass(frozen=True, slots=True)
class Pieces:
    """The smallest runs of a pair of groups: one per layer, plane and head."""

    source: Group
    destination: Group
    heads: tuple[int, ...]
    element: int

    def runs(self) -> Iterator[Run]:
        """One run per layer, plane and head; raises IncompatiblePair for what cannot be copied."""
        for name, source, destination in self.matches():
            yield from self._of_plane(name, source, destination)

    def matches(self) -> Iterator[tuple[str, Plane, Plane]]:
        """Planes of decode with their counterparts on prefill, and a name for each."""
        held = {(plane.layer, plane.kind): plane for plane in self.source.planes}
        layers = {plane.layer for plane in self.source.planes}
        for plane in self.destination.planes:
            if plane.layer not in layers:
                continue  # another pipeline stage sends it
            name = f"{NOUNS[plane.kind]} of layer {plane.layer}"
            match = held.get((plane.layer, plane.kind))
            if match is None:
                raise IncompatiblePair(f"{name} is stored on decode but not on prefill")
            if match.width != plane.width:
                raise IncompatiblePair(
                    f"{name} has {match.width} channels per head on prefill and "
                    f"{plane.width} on decode"
                )
            yield name, match, plane

    def check(self) -> None:
        """Raise IncompatiblePair for what no order of the bytes could bring together."""
        for name, source, destination in self.matches():
            if source.interior or destination.interior:
                self._same_opaque(name, source, destination)
                if not (source.head and destination.head):
                    self._one_span(name, source, destination)

    def _of_plane(self, name: str, source: Plane, destination: Plane) -> Iterator[Run]:
        length, whole_page = self._length(name, source, destination)
        steps = Steps(source.page, source.token, destination.page, destination.token)
        if whole_page:
            steps = Steps(source.page, 0, destination.page, 0)
        source_index = {head: index for index, head in enumerate(self.source.heads)}
        destination_index = {head: index for index, head in enumerate(self.destination.heads)}
        heads = self.heads
        if source.interior and not (source.head and destination.head):
            heads = self._one_span(name, source, destination)
        for head in heads:
            yield Run(
                steps,
                source.region,
                destination.region,
                source.offset + source_index[head] * source.head,
                destination.offset + destination_index[head] * destination.head,
                length,
                whole_page,
                name,
            )

    def _length(self, name: str, source: Plane, destination: Plane) -> tuple[int, bool]:
        """Contiguous bytes of one head, and whether they are a whole page rather than a token."""
        if source.interior or destination.interior:
            self._same_opaque(name, source, destination)
            return source.page_bytes, True
        if all(
            plane.channel == self.element or plane.width == 1 for plane in (source, destination)
        ):
            return source.width * self.element, False
        words = self._order(source, self.source), self._order(destination, self.destination)
        grids = self.source.page_tokens, self.destination.page_tokens
        if words[0] != words[1] or words[0] != "[channel, token]":
            raise NeedsStaging(f"{name} is stored {words[0]} on prefill and {words[1]} on decode")
        if grids[0] != grids[1]:
            raise NeedsStaging(
                f"{name} is stored {words[0]} in pages of {grids[0]} tokens on prefill and "
                f"{grids[1]} on decode"
            )
        return source.width * grids[0] * self.element, True

    def _order(self, plane: Plane, group: Group) -> str:
        if plane.channel == self.element:
            return "[token, channel]"
        dense = plane.token == self.element and plane.channel == group.page_tokens * self.element
        return "[channel, token]" if dense else "with gaps between its channels"

    def _same_opaque(self, name: str, source: Plane, destination: Plane) -> None:
        tags = [plane.interior or "plain" for plane in (source, destination)]
        if tags[0] != tags[1]:
            raise IncompatiblePair(
                f"{name} is packed as {tags[0]} on prefill and {tags[1]} on decode; packed bytes "
                "are never taken apart"
            )
        pages = self.source.page_tokens, self.destination.page_tokens
        if self.source.kind == "state":
            pages = (1, 1)  # one page per request, however many tokens its block counts
        for what, prefill, decode in (
            ("tokens", *pages),
            ("bytes", source.page_bytes, destination.page_bytes),
        ):
            if prefill != decode:
                raise IncompatiblePair(
                    f"{name} is packed as {tags[0]} in pages of {prefill} {what} on prefill and "
                    f"{decode} on decode"
                )

    def _one_span(self, name: str, source: Plane, destination: Plane) -> tuple[int, ...]:
        """An opaque page that holds all heads goes as one, so all of them must be the same."""
        if (
            source.head
            or destination.head
            or not (self.source.heads == self.destination.heads == self.heads)
        ):
            raise IncompatiblePair(
                f"{name} is packed as {source.interior} with all heads of a rank in one page, and "
                f"the ranks hold heads {self.source.heads} on prefill and "
                f"{self.destination.heads} on decode"
            )
        return self.heads[:1]
