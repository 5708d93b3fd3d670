"""Keys of the side channel: a file of one or two, read again when it changes.

Whoever holds a key may ask and answer; nobody else may, and nobody else can read along. A key is
a CURVE secret key (curve25519, 40 characters of Z85) that all engines, routers and tools of a
deployment share. The first line is what a server answers with; a question is tried with every
line in turn. So no step of a rotation needs a restart or all files changed at once:

    old  ->  old, new  ->  new, old  ->  new      each step on every machine before the next
"""

from __future__ import annotations

import argparse
import logging
import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zmq

from neuron_push.errors import ConfigError

__all__ = ["MOST_KEYS", "Key", "Keyring", "add_option", "read"]

logger = logging.getLogger(__name__)

MOST_KEYS: Final = 2
_LARGEST_FILE: Final = 4096
_VARIABLE: Final = "NEURON_PUSH_SIDE_CHANNEL_KEYS"


@dataclass(frozen=True, slots=True)
class Key:
    """A key pair in Z85; `repr` does not show the secret."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"Key({self.public.decode()})"


def add_option(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """The option of a command that asks engines, as the engines' own setting."""
    parser.add_argument(
        "--side-channel-keys", metavar="FILE", default=os.environ.get(_VARIABLE, ""),
        help=f"the engines' side_channel_keys ({_VARIABLE})",
    )  # fmt: skip


def read(path: Path) -> tuple[Key, ...]:
    """The keys in a file, in order; empty lines and lines that begin with # are passed over.

    Raises ConfigError for a file that others could read or change, or that holds no keys.
    """
    where = f"side_channel_keys {path}"
    try:
        with path.open("rb") as file:
            _guard(where, os.fstat(file.fileno()))
            text = file.read(_LARGEST_FILE).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"{where}: {error.strerror}") from None
    lines = [line.strip() for line in text.splitlines()]
    found = [line for line in lines if line and not line.startswith("#")]
    if not 1 <= len(found) <= MOST_KEYS:
        raise ConfigError(f"{where} holds {len(found)} keys; it must hold one, or two in rotation")
    return tuple(_key(where, line) for line in found)


def _guard(where: str, status: os.stat_result) -> None:
    """Refuse a file that is not ours alone; one of root's may be readable for a group."""
    mode = stat.S_IMODE(status.st_mode)
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{where} is not a file")
    if status.st_uid not in (0, os.geteuid()):
        raise ConfigError(f"{where} belongs to another user; chown it to the engine's, or to root")
    if mode & (0o037 if status.st_uid == 0 else 0o077):
        raise ConfigError(f"{where} has mode {mode:04o}: others may read or change it; chmod 0400")


def _key(where: str, line: str) -> Key:
    secret = line.encode("ascii", "replace")
    try:
        return Key(zmq.curve_public(secret), secret)
    except (zmq.ZMQError, ValueError):
        raise ConfigError(
            f"{where}: a line is no key; `neuron-push key` makes one, of 40 characters"
        ) from None


class Keyring:
    """The keys of one file, as it is now. Raises ConfigError if it cannot be read at first.

    A file that cannot be read later leaves the keys as they were, and is logged. It is looked at
    every `period` seconds at most, by whoever asks for the keys.
    """

    def __init__(self, path: str | Path, period: float = 1.0) -> None:
        self._path = Path(path)
        self._period = period
        self._stamp = self._look()
        self._looked = time.monotonic()
        self._keys = read(self._path)

    @classmethod
    def of(cls, path: str) -> Keyring | None:
        """The ring of a setting; None if it is empty."""
        return cls(path) if path else None

    @property
    def keys(self) -> tuple[Key, ...]:
        """The keys to use, the preferred one first."""
        now = time.monotonic()
        if now - self._looked >= self._period:
            self._looked = now
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                self._reload()
        return self._keys

    def knows(self, public: bytes) -> bool:
        """Whether a public key (Z85) belongs to one of the keys. Any thread may ask."""
        return any(key.public == public for key in self._keys)

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode, status.st_uid

    def _reload(self) -> None:
        try:
            self._keys = read(self._path)
        except ConfigError as error:
            logger.error("%s; the keys read before stay in use", error)
        else:
            logger.info("side_channel_keys %s: read again", self._path)
