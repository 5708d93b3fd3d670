"""The `neuron-push` command. Only the chosen subcommand's module is imported."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from neuron_push import __version__
from neuron_push.errors import NeuronPushError


@dataclass(frozen=True)
class Command:
    """A module with `add_arguments(parser)` and `main(args) -> int`."""

    module: str
    help: str


@dataclass(frozen=True)
class Group:
    """Commands under a common word."""

    commands: Mapping[str, Command]
    help: str


COMMANDS: Final[Mapping[str, Command | Group]] = {
    "demo": Command("neuron_push.demo.command", "push KV between two real engines, and compare"),
    "emulate": Command("neuron_push.emulation.command", "start a fleet of emulated engines"),
    "doctor": Command("neuron_push.doctor.command", "say what is wrong here, and with a peer"),
    "router": Command("neuron_push.router.command", "serve through prefill/decode pairs"),
    "key": Command("neuron_push.sidechannel.keygen", "make a key for the side channel"),
    "trace": Command("neuron_push.trace.command", "show where the time to the first token went"),
    "top": Command("neuron_push.top", "watch a router and its engines"),
    "plan": Group(
        {"explain": Command("neuron_push.explain", "say whether and how two engines can talk")},
        "how KV gets from one engine's pages into another's",
    ),
    "bench": Group(
        {
            "sweep": Command(
                "neuron_push.bench.sweep.command", "TTFT and TPOT over lengths, rates"
            ),
            "plot": Command("neuron_push.bench.sweep.plot", "charts of a sweep"),
            "report": Command("neuron_push.bench.sweep.report", "a page of a sweep, with verdicts"),
            "handover": Command("neuron_push.bench.handover.command", "from prefill to decode"),
            "notice": Command("neuron_push.bench.handover.notice", "how soon decode is told"),
            "transform": Command("neuron_push.bench.transform", "cost of packing and unpacking"),
            "plan": Command("neuron_push.bench.plan", "cost of planning copies"),
            "router": Command("neuron_push.bench.router", "what the router adds to a request"),
            "hooks": Command("neuron_push.bench.hooks", "cost of the connector in engine steps"),
            "faults": Command("neuron_push.bench.faults", "how soon faults are told, blocks back"),
        },
        "micro-benchmarks",
    ),
}


def make_parser(words: Sequence[str]) -> argparse.ArgumentParser:
    """A parser that knows every command's name, and the options of the one in `words`."""
    parser = argparse.ArgumentParser(
        prog="neuron-push", description="Push KV caches between vLLM engines."
    )
    parser.add_argument("--version", action="version", version=f"neuron-push {__version__}")
    _add(parser, COMMANDS, [word for word in words if not word.startswith("-")])
    return parser


def _add(
    parser: argparse.ArgumentParser, commands: Mapping[str, Command | Group], words: Sequence[str]
) -> None:
    choices = parser.add_subparsers(required=True, metavar="COMMAND", title="commands")
    chosen, rest = (words[0], words[1:]) if words else ("", [])
    for name, command in commands.items():
        child = choices.add_parser(name, help=command.help)
        if isinstance(command, Group):
            _add(child, command.commands, rest if name == chosen else [])
        elif name == chosen:
            module = importlib.import_module(command.module)
            module.add_arguments(child)
            child.set_defaults(main=module.main)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. 2 for what the user can mend, 130 when interrupted."""
    words = sys.argv[1:] if argv is None else argv
    try:
        args = make_parser(words).parse_args(words)
        return int(args.main(args))
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("neuron_push"):
            raise
        print(f"neuron-push: {error}: install the extra that brings it", file=sys.stderr)
        return 2
    except NeuronPushError as error:
        print(f"neuron-push: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("neuron-push: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
