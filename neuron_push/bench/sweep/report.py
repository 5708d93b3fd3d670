"""`neuron-push bench report`: one page of charts, ratios, verdicts, setup and raw files.

The page holds the verdicts also as data. `--check` makes it anew from the raw files and compares:
a figure that was changed on the page, or a raw file that was changed after, does not pass.
Charts are pictures of the same data and are left out of that comparison, as plotting libraries
differ from version to version.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from neuron_push.bench.sweep import claims, page, plot, results
from neuron_push.bench.sweep.claims import Claim, Verdict
from neuron_push.bench.sweep.results import Result
from neuron_push.errors import ConfigError

CHART: Final = re.compile(r"<!-- chart -->.*?<!-- end of chart -->", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.description = (
        "Write one self-contained HTML page about a folder of results, or check that a page says"
        " what the files say. Exit status 1: a claim is missed, or the page disagrees."
    )
    parser.add_argument("results", type=Path, help="folder of result files")
    parser.add_argument("--page", type=Path, help="the page (report.html in that folder)")
    parser.add_argument("--claims", type=Path, default=claims.SHIPPED, help="what must hold (YAML)")
    parser.add_argument(
        "--check", action="store_true", help="recompute everything, and compare with the page"
    )


def main(args: argparse.Namespace) -> int:
    """Entry for the command line."""
    path: Path = args.page or args.results / "report.html"
    study = read(args.results, claims.load(args.claims))
    if args.check:
        wrong = check(study, path)
        for line in wrong:
            print(f"{path}: {line}")
        print(f"{path}: {'disagrees with the raw files' if wrong else 'agrees'}")
        return 1 if wrong else 0
    path.write_text(page.render(study, _charts(study.results)))
    for verdict in study.verdicts:
        print(f"{verdict.state:13} {verdict.text}")
    print(path)
    return 1 if any(verdict.state == "missed" for verdict in study.verdicts) else 0


@dataclass(frozen=True)
class Study:
    """Everything that a page is made of."""

    results: list[Result]
    verdicts: list[Verdict]
    files: dict[str, Any]
    """What other benchmarks wrote, by file name."""
    digests: dict[str, str]
    """SHA-256 of every raw file."""
    raw: dict[str, Any]
    """The raw files."""


def read(folder: Path, wanted: Sequence[Claim]) -> Study:
    """Read a folder and judge."""
    found = results.load(folder)
    files = claims.other_files(folder, wanted)
    names = [result.name for result in found] + sorted(files)
    texts = {name: (folder / name).read_bytes() for name in names}
    return Study(
        found, claims.judge(wanted, found, files), files,
        {name: hashlib.sha256(text).hexdigest() for name, text in texts.items()},
        {name: json.loads(text) for name, text in texts.items()},
    )  # fmt: skip


def check(study: Study, path: Path) -> list[str]:
    """How a page disagrees with the raw files; nothing if it does not."""
    try:
        text = path.read_text()
        said = page.data(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a page of this command: {error}") from None
    wrong = []
    for name in sorted(said["digests"].keys() | study.digests.keys()):
        if said["digests"].get(name) != study.digests.get(name):
            state = "is not there" if name not in study.digests else "is not the one it was made of"
            wrong.append(f"{name} {state}")
    now = {verdict.id: msgspec.to_builtins(verdict) for verdict in study.verdicts}
    then = {verdict["id"]: verdict for verdict in said["verdicts"]}
    for name in sorted(now.keys() | then.keys()):
        if now.get(name) != then.get(name):
            states = [each.get(name, {}).get("state", "nothing") for each in (then, now)]
            wrong.append(f"claim {name}: the page says {states[0]}, the files {states[1]}, or"
                         " with other figures")  # fmt: skip
    if not wrong and CHART.sub("", text) != CHART.sub("", page.render(study, [])):
        wrong.append("what it shows is not what the files give")
    return wrong


def _charts(found: Sequence[Result]) -> list[str]:
    """The charts as SVG texts."""
    with tempfile.TemporaryDirectory() as folder:
        paths = plot.draw(found, Path(folder))
        return [
            text[text.index("<svg") :]
            for path in paths
            if path.suffix == ".svg"
            for text in [path.read_text()]
        ]
