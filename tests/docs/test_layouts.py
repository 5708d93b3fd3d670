"""The outputs of `plan explain` in docs/layouts.md are what the command prints today.

`python -m tests.docs.test_layouts` brings the page up to date.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
from pathlib import Path

from neuron_push import cli

PAGE = Path(__file__).resolve().parents[2] / "docs/layouts.md"
RUN = re.compile(r"^```\n\$ neuron-push (plan explain [^\n]*)\n(.*?)^```$", re.M | re.S)


def printed(words: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        cli.main(shlex.split(words))
    return out.getvalue()


def test_the_page_shows_what_the_command_prints():
    shown = RUN.findall(PAGE.read_text())
    pairs = [re.findall(r"--(?:from|to) (\S+)", words) for words, _ in shown]
    assert {("trn2", "p5en"), ("p5en", "trn2"), ("trn2", "trn2")} <= set(map(tuple, pairs))
    for words, output in shown:
        assert output == printed(words), f"{words}: run python -m tests.docs.test_layouts"


def renew(found: re.Match[str]) -> str:
    return f"```\n$ neuron-push {found[1]}\n{printed(found[1])}```"


if __name__ == "__main__":
    PAGE.write_text(RUN.sub(renew, PAGE.read_text()))
