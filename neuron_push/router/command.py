"""`neuron-push router`: the command line of the router."""

from __future__ import annotations

import argparse
import asyncio
import logging
import ssl
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from aiohttp import web

from neuron_push.errors import ConfigError
from neuron_push.router import policies
from neuron_push.router.app import make_app
from neuron_push.router.discovery import File, Source
from neuron_push.router.dispatch import Rules
from neuron_push.router.fleet import Incast
from neuron_push.router.ingress import Keys
from neuron_push.router.kubernetes import Cluster, Endpoints
from neuron_push.router.legs import Limits
from neuron_push.router.metrics import Metrics
from neuron_push.router.places import Listing
from neuron_push.router.settings import Settings
from neuron_push.sidechannel import add_option

PLACE = "URL[#side=[HOST:]PORT][&weight=W][&device=NAME][&ranks=N]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the router's options."""
    parser.description = (
        "Serve OpenAI completions through pairs of prefill and decode engines. An engine is the"
        " URL of its vLLM server; its side channel is on the same host, unless #side= says where."
        " Engine ids and sizes are asked there."
    )
    _add_engines(parser.add_argument_group("engines"))
    _add_choice(parser.add_argument_group("choice"))
    _add_limits(parser.add_argument_group("limits, in seconds unless they say otherwise"))
    _add_server(parser.add_argument_group("server"))


def _add_engines(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for leg in ("prefill", "decode"):
        add(f"--{leg}", metavar=PLACE, action="append", default=[], help="may be repeated")
    add("--engines-file", type=Path, help='watched JSON: {"prefill": [PLACE], "decode": [PLACE]}')
    add(
        "--kubernetes",
        action="store_true",
        help="EndpointSlices of this namespace that carry the label neuron-push/leg",
    )
    add("--kubernetes-url", help="API server, where the pod's own is not meant")
    add("--kubernetes-namespace", default="default", help="with --kubernetes-url")
    add("--side-channel-port", type=int, default=5600, help="where #side= is not given")
    add_option(group)
    add("--refresh", type=float, default=Settings.refresh, help="seconds between asking engines")
    add("--engine-key-file", type=Path, help="bearer token that engines ask for")
    add("--engine-ca", type=Path, help="authority of engines with https URLs")


def _add_choice(group: argparse._ArgumentGroup) -> None:
    add, rules = group.add_argument, Rules()
    for leg in ("prefill", "decode"):
        add(f"--{leg}-policy", default="power_of_two", choices=policies.NAMES)
    add(
        "--prefer", metavar="P:D", action="append", default=[],
        help="device pair to prefer, such as trn2:p5en; the first is the best",
    )  # fmt: skip
    add(
        "--mode", default=rules.mode, choices=["push", "pull"],
        help="pull chooses the decode engine after prefill; engines must serve it",
    )  # fmt: skip
    add(
        "--disaggregation", default=rules.disaggregation, choices=["require", "prefer"],
        help="prefer: a decode engine serves alone when no pair is usable",
    )  # fmt: skip
    add("--local-below", type=int, default=0, help="tokens; shorter prompts are not worth a pair")
    add("--retries", type=int, default=rules.retries, help="attempts after the first")
    add("--session-header", default=Settings.session_header, help="names a request's session")
    add(
        "--canary", type=float, default=0.0,
        help="seconds between one-token requests through each engine; 0: /ready sends them",
    )  # fmt: skip


def _add_limits(group: argparse._ArgumentGroup) -> None:
    add, limits = group.add_argument, Limits()
    add("--max-body", type=int, default=Settings.most_body, help="longest request, bytes")
    add("--max-in-flight", type=int, default=0, help="requests at once; 0: no limit")
    add("--max-per-tenant", type=int, default=0, help="requests of one key at once; 0: no limit")
    add(
        "--max-transfers-into", type=int, default=0,
        help="requests whose KV is on its way to one decode engine; more wait; 0: no limit",
    )  # fmt: skip
    add(
        "--max-transfers-from", type=int, default=0,
        help="the same for one prefill engine",
    )  # fmt: skip
    add("--connect-timeout", type=float, default=limits.connect)
    add("--prefill-timeout", type=float, default=limits.prefill, help="queueing included")
    add(
        "--silence-timeout", type=float, default=limits.silence,
        help="between two pieces of a decode engine's answer; the first awaits prefill",
    )  # fmt: skip
    add(
        "--kv-timeout", type=float,
        help="for the KV to reach the decode engine; default: the engine's own patience",
    )  # fmt: skip
    add("--deadline", type=float, help="from arrival to the first byte; default: none")
    add(
        "--room-timeout",
        type=float,
        default=Rules.room,
        help="waiting for free KV blocks or transfers",
    )
    add("--drain", type=float, default=30.0, help="for requests under way when told to stop")


def _add_server(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=int, default=8000, help="port to listen on")
    add("--keys-file", type=Path, help="tenant:token lines; without it anybody may ask")
    add("--tls-cert", type=Path, help="certificate chain (PEM)")
    add("--tls-key", type=Path, help="its private key (PEM)")
    add("--trace-events", type=int, default=0, help="trace events to keep; 0: no tracing")
    add("--log-level", default="info", choices=["debug", "info", "warning", "error"])


def settings(args: argparse.Namespace) -> Settings:
    """The settings that the options name; raises ConfigError."""
    _check(args)
    listing = Listing.parse(args.prefill, args.decode, args.side_channel_port)
    return Settings(
        prefill=listing.prefill,
        decode=listing.decode,
        limits=Limits(
            args.connect_timeout, args.prefill_timeout, args.silence_timeout, args.kv_timeout,
            args.deadline,
        ),
        rules=Rules(
            args.mode, args.disaggregation, args.local_below, args.retries, args.room_timeout
        ),
        prefill_policy=args.prefill_policy,
        decode_policy=args.decode_policy,
        preferred=[_device_pair(text) for text in args.prefer],
        incast=Incast(args.max_transfers_into, args.max_transfers_from),
        most_body=args.max_body,
        most_in_flight=args.max_in_flight,
        most_per_tenant=args.max_per_tenant,
        keys=Keys.read(args.keys_file) if args.keys_file else Keys(),
        engine_key=_secret(args.engine_key_file),
        engine_tls=_authority(args.engine_ca),
        session_header=args.session_header,
        refresh=args.refresh,
        canary_period=args.canary,
        trace_events=args.trace_events,
    )  # fmt: skip


def _check(args: argparse.Namespace) -> None:
    timeouts = ("connect_timeout", "prefill_timeout", "silence_timeout", "kv_timeout", "deadline")
    for name in ("max_body", "refresh", *timeouts):
        value = getattr(args, name)
        if value is not None and value <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be greater than 0")
    counts = (
        "max_transfers_into",
        "max_transfers_from",
        "max_in_flight",
        "max_per_tenant",
        "local_below",
        "retries",
        "trace_events",
    )
    for name in ("canary", "room_timeout", "drain", *counts):
        if getattr(args, name) < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative")
    named = bool(args.prefill or args.decode)
    kubernetes = bool(args.kubernetes or args.kubernetes_url)
    if named + bool(args.engines_file) + kubernetes != 1:
        raise ConfigError(
            "engines come from one place: --prefill and --decode, or --engines-file,"
            " or --kubernetes"
        )
    if named and not (args.prefill and args.decode):
        raise ConfigError("both legs need an engine: --prefill URL and --decode URL")
    if bool(args.tls_cert) != bool(args.tls_key):
        raise ConfigError("--tls-cert and --tls-key belong together")


def source(args: argparse.Namespace, metrics: Metrics) -> Source | None:
    """Where changing lists of engines come from; None when they are named."""
    if args.engines_file:
        file = File(args.engines_file, args.side_channel_port, metrics)
        file.read()  # a mistake in the first version is the operator's to see now
        return file
    if args.kubernetes_url:
        return Endpoints(Cluster(args.kubernetes_url, args.kubernetes_namespace), metrics)
    if args.kubernetes:
        return Endpoints(Cluster.inside(), metrics)
    return None


def main(args: argparse.Namespace) -> int:
    """Serve until stopped by a signal."""
    from neuron_push.sidechannel import Keyring, ask_async

    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    metrics = Metrics()
    asking = partial(ask_async, ring=Keyring.of(args.side_channel_keys))
    app = make_app(settings(args), asking, source(args, metrics), metrics)
    tls = _certificate(args.tls_cert, args.tls_key)
    scheme = "https" if tls else "http"
    logging.getLogger(__name__).info("listening on %s://%s:%d", scheme, args.host, args.port)
    web.run_app(
        app,
        host=args.host,
        port=args.port,
        handler_cancellation=True,
        access_log=None,
        ssl_context=tls,
        shutdown_timeout=args.drain,
        print=None,
        loop=_new_loop(),
    )
    return 0


def _device_pair(text: str) -> tuple[str, str]:
    prefill, colon, decode = text.partition(":")
    if not (prefill and colon and decode):
        raise ConfigError(f"--prefer {text!r} is not a device pair such as trn2:p5en")
    return prefill, decode


def _secret(path: Path | None) -> str:
    try:
        return path.read_text().strip() if path else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None


def _authority(path: Path | None) -> ssl.SSLContext | None:
    if path is None:
        return None
    try:
        return ssl.create_default_context(cafile=str(path))
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--engine-ca {path}: {error}") from None


def _certificate(cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    if cert is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"--tls-cert {cert}: {error}") from None
    return context


def _new_loop() -> asyncio.AbstractEventLoop:
    """An event loop: uvloop's where it is installed, as it costs less per streamed piece."""
    if find_spec("uvloop"):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()
