"""Engines as Kubernetes knows them: the EndpointSlices of labelled Services.

A Service of prefill engines carries the label `neuron-push/leg: prefill`, one of decode engines
`neuron-push/leg: decode`; Kubernetes copies labels to EndpointSlices. Ports are found by name:
`http` for the server, `side-channel` for the side channel. Labels `neuron-push/weight`,
`neuron-push/device` and `neuron-push/ranks` say what a place's options say.

An endpoint counts from the moment it exists, ready or not: the router asks engines itself, and
an engine whose readiness waits for the router must not wait for ever. One that terminates is
given no more work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from neuron_push.errors import ConfigError, TransportError
from neuron_push.router.metrics import Metrics
from neuron_push.router.places import Listing, Place

log = logging.getLogger(__name__)

LEG: Final = "neuron-push/leg"
ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
# The server ends a watch after this many seconds; we come back.
WATCH_SECONDS: Final = 240
# Longest line of a watch: one slice lists at most 1,000 endpoints.
LONGEST_LINE: Final = 8 << 20
RETRY: Final = 1.0
LONGEST_RETRY: Final = 30.0


@dataclass(frozen=True)
class Cluster:
    """Where the API server is and who we are there."""

    url: str
    namespace: str
    token: Path | None = None
    authority: Path | None = None

    @classmethod
    def inside(cls, environment: Mapping[str, str] = os.environ, folder: Path = ACCOUNT) -> Cluster:
        """As a pod sees it; raises ConfigError outside of one."""
        host = environment.get("KUBERNETES_SERVICE_HOST")
        port = environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (folder / "token").is_file():
            raise ConfigError("not in a Kubernetes pod with a service account: use --engines-file")
        host = f"[{host}]" if ":" in host else host
        namespace = (folder / "namespace").read_text().strip()
        return cls(f"https://{host}:{port}", namespace, folder / "token", folder / "ca.crt")

    def headers(self) -> dict[str, str]:
        """Read anew each time: tokens of service accounts are replaced within the hour."""
        if self.token is None:
            return {}
        return {"Authorization": f"Bearer {self.token.read_text().strip()}"}

    def context(self) -> ssl.SSLContext | bool:
        """How the server proves itself."""
        if self.authority is None:
            return True
        return ssl.create_default_context(cafile=str(self.authority))


class Endpoints:
    """Lists and watches EndpointSlices."""

    def __init__(self, cluster: Cluster, metrics: Metrics, retry: float = RETRY) -> None:
        self._cluster = cluster
        self._metrics = metrics
        self._retry = retry
        self._slices: dict[str, dict[str, Any]] = {}

    async def listings(self) -> AsyncIterator[Listing]:
        """A list after every change; what was known stays while the API server is away."""
        connector = aiohttp.TCPConnector(ssl=self._cluster.context())
        wait = self._retry
        async with aiohttp.ClientSession(connector=connector, read_bufsize=LONGEST_LINE) as session:
            while True:
                try:
                    version = await self._list(session)
                    self._metrics.listings.labels("ok").inc()
                    wait = self._retry
                    yield self.listing()
                    async for _ in self._watch(session, version):
                        yield self.listing()
                except (aiohttp.ClientError, OSError, TransportError, TimeoutError) as error:
                    log.warning("Kubernetes API: %s", error or type(error).__name__)
                    self._metrics.listings.labels("failed").inc()
                    await asyncio.sleep(wait)
                    wait = min(2 * wait, LONGEST_RETRY)

    def listing(self) -> Listing:
        """The places in the slices known now, in a fixed order."""
        places: dict[str, list[Place]] = {"prefill": [], "decode": []}
        for name in sorted(self._slices):
            each = self._slices[name]
            leg = each["metadata"].get("labels", {}).get(LEG)
            if leg in places:
                places[leg] += places_in(each)
        return Listing(places["prefill"], places["decode"])

    @property
    def _url(self) -> str:
        group = "/apis/discovery.k8s.io/v1"
        return f"{self._cluster.url}{group}/namespaces/{self._cluster.namespace}/endpointslices"

    async def _list(self, session: aiohttp.ClientSession) -> str:
        headers = self._cluster.headers()
        limit = aiohttp.ClientTimeout(total=30)
        params = {"labelSelector": LEG}
        async with session.get(self._url, params=params, headers=headers, timeout=limit) as answer:
            if answer.status != 200:
                reason = (await answer.text())[:300]
                raise TransportError(f"list answered {answer.status}: {reason}")
            found = _decode(await answer.read())
        self._slices = {each["metadata"]["name"]: each for each in found.get("items") or []}
        return str(found.get("metadata", {}).get("resourceVersion", ""))

    async def _watch(self, session: aiohttp.ClientSession, version: str) -> AsyncIterator[None]:
        """Apply changes as they come, until the server ends the watch."""
        params = {
            "labelSelector": LEG,
            "watch": "1",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        limit = aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=WATCH_SECONDS + 30)
        headers = self._cluster.headers()
        async with session.get(self._url, params=params, headers=headers, timeout=limit) as answer:
            if answer.status == 410:
                return  # too old: list again
            if answer.status != 200:
                raise TransportError(f"watch answered {answer.status}")
            async for line in answer.content:
                if line.strip():
                    if not self._apply(_decode(line)):
                        return
                    yield

    def _apply(self, event: Mapping[str, Any]) -> bool:
        """Record one change; False if the list must be read anew."""
        kind, each = event.get("type"), event.get("object", {})
        if kind == "ERROR":
            return False
        name = each.get("metadata", {}).get("name", "")
        if kind == "DELETED":
            self._slices.pop(name, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._slices[name] = each
        return True


def places_in(each: Mapping[str, Any]) -> list[Place]:
    """The places of one EndpointSlice; those that cannot be one are left out with a warning."""
    metadata = each["metadata"]
    labels = metadata.get("labels", {})
    ports = {port.get("name"): port.get("port") for port in each.get("ports") or []}
    places: list[Place] = []
    for endpoint in each.get("endpoints") or []:
        addresses = endpoint.get("addresses")
        if not addresses or (endpoint.get("conditions") or {}).get("terminating"):
            continue
        host = f"[{addresses[0]}]" if ":" in addresses[0] else addresses[0]
        words = [f"side={host}:{ports.get('side-channel')}"]
        for option in ("weight", "device", "ranks"):
            if value := labels.get(f"neuron-push/{option}"):
                words.append(f"{option}={value}")
        try:
            place = Place.parse(f"http://{host}:{ports.get('http')}#{'&'.join(words)}", 0)
        except (ConfigError, ValueError) as error:
            log.warning("EndpointSlice %s: %s", metadata.get("name"), error)
            continue
        places += place.each_rank()
    return places


def _decode(raw: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TransportError(f"not an answer of the Kubernetes API: {error}") from None


__all__ = ["Cluster", "Endpoints", "places_in"]
