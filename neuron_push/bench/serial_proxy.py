"""The least that a proxy for push can do, to compare with: round robin, both legs, no more.

It stands in for vLLM's demo push proxy, which is an example of its source tree and not part of
the installed package; `neuron-push bench router --demo-proxy FILE` runs that one instead. Like
it, this one knows its prefill engine's identity beforehand, retries nothing, cancels nothing
and counts nothing. With `--serial` it waits for prefill first, as pull proxies do.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import uuid

import aiohttp
from aiohttp import web


class Proxy:
    """Two lists of engines and a session."""

    def __init__(self, prefill: list[str], decode: list[str], serial: bool) -> None:
        self._prefill = itertools.cycle(prefill)
        self._decode = itertools.cycle(decode)
        self._serial = serial
        self._session: aiohttp.ClientSession | None = None

    async def complete(self, request: web.Request) -> web.StreamResponse:
        """Send both legs and pass the decode leg's answer on."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        body = await request.json()
        name = uuid.uuid4().hex
        headers = {"X-Request-Id": name}
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        first = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
        leg = asyncio.create_task(self._send(next(self._prefill), request.path, first, headers))
        if self._serial:
            await leg
        params = {
            "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name,
            "remote_engine_id": "prefill", "remote_host": "127.0.0.1", "remote_port": 5600,
        }  # fmt: skip
        second = {**body, "kv_transfer_params": params}
        url = next(self._decode) + request.path
        async with self._session.post(url, json=second, headers=headers) as answer:
            response = web.StreamResponse(status=answer.status)
            response.content_type = answer.content_type
            await response.prepare(request)
            async for piece in answer.content.iter_any():
                await response.write(piece)
        await leg
        return response

    async def _send(
        self, url: str, path: str, body: dict[str, object], headers: dict[str, str]
    ) -> None:
        assert self._session is not None
        async with self._session.post(url + path, json=body, headers=headers) as answer:
            await answer.read()


def main() -> None:
    """Serve until killed."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--prefill", action="append", required=True)
    parser.add_argument("--decode", action="append", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--serial", action="store_true")
    args = parser.parse_args()
    app = web.Application(client_max_size=64 << 20)
    proxy = Proxy(args.prefill, args.decode, args.serial)
    app.router.add_post("/v1/completions", proxy.complete)
    web.run_app(app, host="127.0.0.1", port=args.port, print=None, access_log=None)


if __name__ == "__main__":
    main()
