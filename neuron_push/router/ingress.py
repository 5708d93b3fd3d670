"""Who may send requests, and how many at once."""

from __future__ import annotations

import hmac
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from neuron_push.errors import ConfigError

ANYBODY = "anybody"


@dataclass(frozen=True)
class Keys:
    """Bearer tokens by tenant. Kept as digests, so that no dump of memory shows them."""

    digests: Sequence[tuple[str, bytes]] = ()

    def __bool__(self) -> bool:
        return bool(self.digests)

    @classmethod
    def read(cls, path: Path) -> Keys:
        """A file of `tenant:token` lines; blank lines and those with # are left out."""
        try:
            lines = path.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read keys from {path}: {error}") from None
        found = []
        for number, line in enumerate(lines, 1):
            if not line.strip() or line.startswith("#"):
                continue
            tenant, colon, token = line.strip().partition(":")
            if not colon or not tenant or not token:
                raise ConfigError(f"{path}:{number}: a line is tenant:token")
            found.append((tenant, _digest(token)))
        if not found:
            raise ConfigError(f"{path} has no key: nobody could send a request")
        return cls(found)

    def tenant(self, authorization: str) -> str | None:
        """Whose token a header carries; every key is compared, whichever fits."""
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        given, owner = _digest(token.strip()), None
        for tenant, digest in self.digests:
            if hmac.compare_digest(digest, given):
                owner = tenant
        return owner


class Refused(Exception):
    """A request is not let in."""

    def __init__(self, status: int, outcome: str, message: str, kind: str) -> None:
        super().__init__(message)
        self.status = status
        self.outcome = outcome
        self.kind = kind


class Gate:
    """Lets requests in, and counts those inside. 0 is no limit."""

    def __init__(self, keys: Keys, most: int, most_per_tenant: int) -> None:
        self._keys = keys
        self._most = most
        self._most_per_tenant = most_per_tenant
        self._inside: Counter[str] = Counter()
        self._total = 0

    @property
    def guarded(self) -> bool:
        """Whether a key is asked for."""
        return bool(self._keys)

    def who(self, headers: Mapping[str, str]) -> str:
        """The tenant of a request; raises Refused."""
        if not self._keys:
            return ANYBODY
        tenant = self._keys.tenant(headers.get("Authorization", ""))
        if tenant is None:
            raise Refused(
                401, "unauthorized", "a valid bearer token is required", "invalid_api_key"
            )
        return tenant

    @contextmanager
    def inside(self, tenant: str) -> Iterator[None]:
        """Count a request while it is served; raises Refused when there are too many."""
        if self._most and self._total >= self._most:
            self._refuse("in_flight", f"{self._most} requests are being served")
        if self._most_per_tenant and self._inside[tenant] >= self._most_per_tenant:
            self._refuse("tenant", f"{self._most_per_tenant} requests of {tenant} are being served")
        self._total += 1
        self._inside[tenant] += 1
        try:
            yield
        finally:
            self._total -= 1
            self._inside[tenant] -= 1
            if not self._inside[tenant]:
                del self._inside[tenant]

    @staticmethod
    def _refuse(limit: str, text: str) -> None:
        raise Refused(429, limit, f"{text}, which is the limit; try again later", "rate_limit")


def _digest(token: str) -> bytes:
    return sha256(token.encode()).digest()
