"""`neuron-push router`: the command line of the router."""

from __future__ import annotations

import argparse
import asyncio
import logging
from importlib.util import find_spec

from aiohttp import web

from neuron_push.errors import ConfigError
from neuron_push.router.app import Settings, make_app
from neuron_push.router.engines import Place
from neuron_push.router.legs import Limits

PLACE = "URL[#side=[HOST:]PORT]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the router's options."""
    parser.description = (
        "Serve OpenAI completions through pairs of prefill and decode engines. An engine is the"
        " URL of its vLLM server; its side channel is on the same host, unless #side= says where."
        " Engine ids and sizes are asked there."
    )
    limits, defaults = Limits(), Settings((), ())
    add = parser.add_argument
    for leg in ("prefill", "decode"):
        add(f"--{leg}", metavar=PLACE, action="append", required=True, help="may be repeated")
    add("--side-channel-port", type=int, default=5600, help="where #side= is not given")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--max-body", type=int, default=defaults.most_body, help="longest request, bytes")
    add("--refresh", type=float, default=defaults.refresh, help="seconds between asking engines")
    add("--connect-timeout", type=float, default=limits.connect, help="seconds")
    add("--prefill-timeout", type=float, default=limits.prefill, help="seconds, queueing included")
    add(
        "--silence-timeout",
        type=float,
        default=limits.silence,
        help="seconds between two pieces of a decode engine's answer; the first awaits prefill",
    )
    add(
        "--kv-timeout",
        type=float,
        help="seconds for the KV to reach the decode engine; default: the engine's own patience",
    )
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def settings(args: argparse.Namespace) -> Settings:
    """The settings that the options name; raises ConfigError."""
    timeouts = ("connect_timeout", "prefill_timeout", "silence_timeout", "kv_timeout")
    for name in ("max_body", "refresh", *timeouts):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be greater than 0")
    return Settings(
        prefill=[Place.parse(text, args.side_channel_port) for text in args.prefill],
        decode=[Place.parse(text, args.side_channel_port) for text in args.decode],
        limits=Limits(*(getattr(args, name) for name in timeouts)),
        most_body=args.max_body,
        refresh=args.refresh,
    )


def main(args: argparse.Namespace) -> int:
    """Serve until stopped by a signal."""
    from neuron_push.sidechannel import ask_async

    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    logging.getLogger(__name__).info("listening on http://%s:%d", args.host, args.port)
    web.run_app(
        make_app(settings(args), ask_async),
        host=args.host,
        port=args.port,
        handler_cancellation=True,
        print=None,
        loop=_new_loop(),
    )
    return 0


def _new_loop() -> asyncio.AbstractEventLoop:
    """An event loop: uvloop's where it is installed, as it costs less per streamed piece."""
    if find_spec("uvloop"):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
