"""What the router itself answers."""

from __future__ import annotations

from typing import Any

import msgspec
from aiohttp import web

from neuron_push.router.bodies import error_body


def as_json(value: Any, status: int = 200) -> web.Response:
    """Any value."""
    raw = msgspec.json.encode(value)
    return web.Response(body=raw, status=status, content_type="application/json")


def as_error(status: int, message: str, kind: str) -> web.Response:
    """An error in the shape that OpenAI clients expect."""
    raw = error_body(status, message, kind)
    headers = {"Retry-After": "1"} if status in (429, 503) else None
    return web.Response(body=raw, status=status, content_type="application/json", headers=headers)
