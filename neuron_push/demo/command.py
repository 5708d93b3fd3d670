"""`neuron-push demo`: starts everything, asks, compares, and stops everything."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from neuron_push import processes, tiny_model
from neuron_push.demo.load import complete_all, random_prompts
from neuron_push.demo.report import Expectation, Moved, Result, Samples
from neuron_push.engines import Engine, EngineOptions, connector, cpu_share
from neuron_push.errors import ConfigError
from neuron_push.ports import HOST, free_ports
from neuron_push.processes import Server

BLOCK: Final = 32
MODEL: Final = "tiny"
# The router needs a second once the engines serve.
ROUTER_TIMEOUT: Final = 30.0
# Engines give blocks back within a step; a lease or a drain may take this long.
REST_TIMEOUT: Final = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the demo's options."""
    parser.description = (
        "Start two vLLM engines on this machine, push the KV of prompts from one into the other"
        " through real NIXL, and compare every output with that of one engine alone."
    )
    add = parser.add_argument
    add("--json", action="store_true", help="end with one JSON object on the last line")
    add("--requests", type=int, default=32, help="prompts to send (default 32)")
    add("--prompt-tokens", type=int, default=1000, help="tokens per prompt (default 1000)")
    add("--output-tokens", type=int, default=16, help="tokens per answer (default 16)")
    add("--concurrency", type=int, default=8, help="prompts under way at once (default 8)")
    add("--seed", type=int, default=0, help="of the prompts (default 0)")
    add("--digest", action="store_true", help="compare a digest of every WRITE before decoding")
    add("--tamper", action="store_true", help="flip one byte of every WRITE: must make it fail")
    add("--keep-logs", type=Path, metavar="DIR", help="write the servers' logs here and keep them")


def check(args: argparse.Namespace) -> None:
    """Refuse what cannot work; raises ConfigError."""
    for name in ("requests", "prompt_tokens", "output_tokens", "concurrency"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be at least 1")
    if args.prompt_tokens < 2:
        raise ConfigError("--prompt-tokens must be at least 2: decode computes the last one itself")
    if not find_spec("vllm"):
        raise ConfigError("the demo runs vLLM: pip install 'neuron-push[cpu,router]'")


def main(args: argparse.Namespace) -> int:
    """Run the demo; 0 only if every output was exact and nothing was left behind."""
    check(args)
    with processes.signals_as_interrupts(), ExitStack() as stack:
        logs = args.keep_logs or Path(stack.enter_context(_folder("neuron-push-logs-")))
        folder = Path(stack.enter_context(_folder("neuron-push-model-")))
        result = Demo(args, logs.absolute(), folder).run()
    return conclude(result, args.json)


def conclude(result: Result, as_json: bool) -> int:
    """Print what was found; the exit status."""
    failures = result.failures()
    print(result.table())
    for failure in failures:
        print(f"FAILED: {failure}")
    if result.tampered and result.token_exact < len(result.pushed):
        print("One byte of every WRITE was flipped on purpose, and it showed.")
        if result.digest:
            print(f"Digests were compared: {result.wrong} answers had wrong tokens.")
    elif result.tampered:
        print("One byte of every WRITE was flipped on purpose, and it did NOT show.")
    if not failures:
        print("Every output is the single engine's, token for token; no KV block is in use.")
    if as_json:
        print(json.dumps(result.as_json()), flush=True)
    return 1 if failures else 0


class Demo:
    """One run over two engines and a router."""

    def __init__(self, args: argparse.Namespace, logs: Path, folder: Path) -> None:
        self._args = args
        self._logs = logs
        length = args.prompt_tokens + args.output_tokens
        self._shape = tiny_model.TinyModel(positions=max(8192, length + BLOCK))
        self._model = tiny_model.make(folder, self._shape)
        fault: dict[str, Any] = {"fault": "tamper"} if args.tamper else {}
        common: dict[str, Any] = {"kv_digest": True} if args.digest else {}
        self._prefill = self._engine("prefill", 0, connector("kv_producer", **common, **fault))
        self._decode = self._engine("decode", 1, connector("kv_consumer", **common))
        self._router = self._make_router()
        self._prompts = random_prompts(args.requests, args.prompt_tokens, args.seed)

    def run(self) -> Result:
        """Start, ask one engine alone, ask through the router, and look at what is left."""
        engines = (self._prefill, self._decode)
        say(f"starting two vLLM engines, logs in {self._logs}")
        with processes.running(engines, progress=say):
            say("asking one engine alone")
            # The prefill engine: it also makes it warm, and has no part in what D decodes later.
            alone = self._ask(self._prefill)
            with processes.running([self._router], ROUTER_TIMEOUT, say):
                before = read(self._decode)
                say("asking through the router: prefill on one engine, decode on the other")
                pushed = self._ask(self._router)
                held = self._wait_for_rest()
            moved = Moved.between(read(self._prefill), before, read(self._decode))
            say("stopping")
        args, shape = self._args, self._shape
        expected = Expectation(
            args.prompt_tokens, args.output_tokens, shape.kv_bytes_per_token, BLOCK
        )
        return Result(expected, alone, pushed, moved, held, args.tamper, args.digest)

    def _engine(self, name: str, index: int, transfer: dict[str, Any]) -> Engine:
        args = self._args
        length = args.prompt_tokens + args.output_tokens
        blocks_each = -(-length // BLOCK) + 1
        options = EngineOptions(
            name=name,
            model=self._model,
            transfer=transfer,
            cpus=cpu_share(index, 2),
            block_size=BLOCK,
            # Twice what can be under way, as prefill holds prompts until they have left.
            kv_blocks=64 + 2 * args.concurrency * blocks_each,
            max_model_len=length + BLOCK,
            served_name=MODEL,
        )
        return Engine(options, self._logs)

    def _make_router(self) -> Server:
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "neuron_push.cli", "router"]
        command += ["--host", HOST, "--port", str(port)]
        for engine in (self._prefill, self._decode):
            command += [f"--{engine.name}", f"{engine.url}#side={HOST}:{engine.side_port}"]
        return Server("router", command, port, self._logs / "router.log")

    def _ask(self, server: Server) -> list[Any]:
        args = self._args
        return asyncio.run(
            complete_all(
                server.url, MODEL, self._prompts, args.output_tokens, args.concurrency, say
            )
        )

    def _wait_for_rest(self) -> dict[str, str]:
        """What each engine holds once nothing changes any more, or after the bound."""
        held: dict[str, str] = {}
        for engine in (self._prefill, self._decode):
            deadline = time.monotonic() + REST_TIMEOUT
            while (held_now := read(engine).in_use()) and time.monotonic() < deadline:
                # Gauges are written by steps, and an idle engine takes none.
                asyncio.run(complete_all(engine.url, MODEL, ["."], 1, 1, lambda _: None))
                time.sleep(0.5)
            held[engine.name] = held_now
        return held


def read(engine: Engine) -> Samples:
    """The engine's metrics now."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=30) as answer:
        return Samples(answer.read().decode())


def say(text: str) -> None:
    """Progress goes to stderr, so that stdout holds the result only."""
    print(f"demo: {text}", file=sys.stderr, flush=True)


@contextmanager
def _folder(prefix: str) -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        yield name
