"""Run all that this machine can; exit status 0 only if something was checked and all passed."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

from neuron_push import __version__, efa
from tests.hardware import suite


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.hardware")
    parser.add_argument("--json", type=Path, help="write the report there too")
    parser.add_argument("--only", choices=["cuda", "neuron", "efa"], action="append")
    parser.add_argument("--limit", type=float, default=suite.LIMIT_S, metavar="SECONDS")
    options = parser.parse_args(arguments)
    load()
    here = suite.present()
    wanted = set(options.only or here)
    chosen = [each for each in suite.CHECKS if each.needs in wanted]
    report = {
        "neuron_push": __version__,
        "machine": efa.instance_type(Path("/")) or platform.machine(),
        "kernel": platform.release(),
        "present": sorted(here),
        **suite.run(chosen, options.limit),
    }
    text = json.dumps(report, indent=2, default=str)
    if options.json:
        options.json.write_text(text + "\n")
    print(text)
    if not chosen:
        print("nothing to check: no CUDA, Neuron or EFA device here", file=sys.stderr)
    return 0 if report["passed"] else 1


def load() -> None:
    """Fill the registry."""
    from tests.hardware import fabric, gpu, neuron  # noqa: F401


if __name__ == "__main__":
    sys.exit(main())
