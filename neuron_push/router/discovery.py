"""Where lists of engines come from. A source is a class with one method, `listings`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec

from neuron_push.errors import ConfigError
from neuron_push.router.metrics import Metrics
from neuron_push.router.places import Listing

log = logging.getLogger(__name__)


class Source(Protocol):
    """Says which engines there are, again whenever that changes."""

    def listings(self) -> AsyncIterator[Listing]:
        """Every list, the first at once; ends only if nothing can change any more."""


class Static:
    """The engines named on the command line."""

    def __init__(self, listing: Listing) -> None:
        self._listing = listing

    async def listings(self) -> AsyncIterator[Listing]:
        """The one list."""
        yield self._listing


class _File(msgspec.Struct, forbid_unknown_fields=True):
    prefill: list[str] = []
    decode: list[str] = []


class File:
    """A JSON file: {"prefill": ["http://10.0.0.1:8100#side=5600"], "decode": [...]}.

    A file that cannot be read changes nothing: the engines of the last good one stay. It is
    compared by content, since mounted ConfigMaps change behind symbolic links.
    """

    def __init__(
        self, path: Path, default_port: int, metrics: Metrics, period: float = 1.0
    ) -> None:
        self._path = path
        self._default_port = default_port
        self._metrics = metrics
        self._period = period

    def read(self) -> tuple[bytes, Listing]:
        """Its content now; raises ConfigError."""
        try:
            raw = self._path.read_bytes()
            named = msgspec.json.decode(raw, type=_File)
        except OSError as error:
            raise ConfigError(f"cannot read {self._path}: {error}") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}: {error}") from None
        return raw, Listing.parse(named.prefill, named.decode, self._default_port)

    async def listings(self) -> AsyncIterator[Listing]:
        """A list whenever the content has changed."""
        last, complaint = b"", ""
        while True:
            try:
                raw, listing = self.read()
            except ConfigError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    log.warning("engines stay as they are: %s", complaint)
                    self._metrics.listings.labels("failed").inc()
            else:
                complaint = ""
                if raw != last:
                    last = raw
                    self._metrics.listings.labels("ok").inc()
                    yield listing
            await asyncio.sleep(self._period)
