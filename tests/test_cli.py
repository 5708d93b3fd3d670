from __future__ import annotations

import subprocess
import sys

import pytest

from neuron_push import cli
from neuron_push.errors import ConfigError


class Module:
    def __init__(self, outcome):
        self.outcome = outcome

    def add_arguments(self, parser):
        parser.add_argument("--number", type=int, default=3)

    def main(self, args):
        if isinstance(self.outcome, BaseException):
            raise self.outcome
        return self.outcome + args.number


@pytest.fixture
def command(monkeypatch):
    """Put one outcome in place of every command's module; returns the names imported."""
    imported = []

    def install(outcome):
        def load(name):
            imported.append(name)
            if isinstance(outcome, ImportError):
                raise outcome
            return Module(outcome)

        monkeypatch.setattr(cli.importlib, "import_module", load)
        return imported

    return install


def test_a_command_runs_with_its_own_options_and_nothing_else_is_imported(command):
    imported = command(0)
    assert cli.main(["demo", "--number", "5"]) == 5
    assert imported == ["neuron_push.demo.command"]


def test_a_command_of_a_group(command):
    imported = command(0)
    assert cli.main(["bench", "plan"]) == 3
    assert imported == ["neuron_push.bench.plan"]


@pytest.mark.parametrize(
    ("outcome", "status", "text"),
    [
        (ConfigError("mend this"), 2, "mend this"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (ModuleNotFoundError("No module named 'aiohttp'", name="aiohttp"), 2, "extra"),
    ],
)
def test_failures_become_a_line_and_a_status(command, capsys, outcome, status, text):
    command(outcome)
    assert cli.main(["router"]) == status
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("words", [[], ["nonsense"], ["bench"], ["bench", "nonsense"]])
def test_unknown_or_missing_commands_are_refused(words, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(words)
    assert exit_.value.code == 2
    assert "usage" in capsys.readouterr().err


def test_the_router_command_does_not_import_an_engine():
    code = (
        "import sys\nfrom neuron_push import cli\n"
        "cli.main(['router', '--prefill', 'x', '--decode', 'y'])\n"
        "print([name for name in ('vllm', 'torch', 'nixl_cu12') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "not a URL" in run.stderr and run.stdout.strip() == "[]"
