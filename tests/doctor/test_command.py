from __future__ import annotations

import argparse
import ast
import json
from pathlib import Path

import pytest

from neuron_push import cli
from neuron_push.doctor import command
from neuron_push.doctor.finding import Finding, error, exit_status, note, ok, warning
from neuron_push.protocol import Address
from tests.doctor.kit import ENTRY, FakeMachine, answer, loaded


def healthy(tmp_path):
    return FakeMachine(
        tmp_path,
        {"VLLM_NIXL_SIDE_CHANNEL_HOST": "me", "VLLM_API_KEY": "hush"},
        children={
            "plugin": loaded(),
            "backend UCX": answer(),
            "backend LIBFABRIC": answer(),
        },
        versions={"vllm": "0.32.0", "nixl-cu12": "1.5.1"},
        offered={"vllm.general_plugins": [ENTRY]},
        hosts={"me": ["10.0.0.1"]},
    )


def run(machine, *words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args(words), machine)


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([], 0),
        ([ok("a", "x"), note("b", "x")], 0),
        ([ok("a", "x"), warning("b", "x", "y", "z")], 1),
        ([error("b", "x", "y", "z"), warning("b", "x", "y", "z")], 2),
    ],
)
def test_the_exit_status_is_the_worst_finding(findings, status):
    assert exit_status(findings) == status


def test_a_healthy_machine_ends_with_0(tmp_path, capsys):
    assert run(healthy(tmp_path)) == 0
    assert capsys.readouterr().out.endswith("0 errors, 0 warnings\n")


def test_a_warning_ends_with_1_and_an_error_with_2(tmp_path):
    machine = healthy(tmp_path)
    machine.shm = 0
    assert run(machine) == 1
    machine.versions["nixl-cu13"] = "1.5.1"
    assert run(machine) == 2


def test_text_says_what_why_and_what_to_do():
    shown = command.text(Finding("a.b", "error", "seen", "reason", "remedy"))
    assert shown == "error   a.b: seen\n        why: reason\n        do:  remedy"


def test_json_holds_every_finding_and_no_secret(tmp_path, capsys):
    assert run(healthy(tmp_path), "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["status"] == 0
    assert {"check", "level", "seen", "why", "remedy"} == set(report["findings"][0])
    assert report["environment"]["VLLM_API_KEY"] == "(redacted)"


def test_a_bad_setting_is_a_finding(tmp_path):
    machine = healthy(tmp_path)
    machine.environ = {"VLLM_NIXL_SIDE_CHANNEL_PORT": "many"}
    assert run(machine) == 2


def test_each_data_parallel_rank_has_a_port(tmp_path, capsys):
    run(healthy(tmp_path), "--data-parallel", "3")
    assert "port 5600 to 5602" in capsys.readouterr().out


def test_a_peer_alone_can_be_asked(tmp_path, capsys):
    # Nobody listens at a reserved port.
    assert run(healthy(tmp_path), "--peer", "127.0.0.1:1", "--peer-only", "--json") == 2
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["check"] == "peer.answers"


@pytest.mark.parametrize("text", ["host", "host:", ":5", "host:x", "host:0", "host:70000"])
def test_an_address_that_is_none_is_refused(text):
    with pytest.raises(argparse.ArgumentTypeError, match="is not HOST:PORT"):
        command.address(text)


def test_addresses_may_be_of_either_kind():
    assert command.address("10.0.0.1:5600") == Address("10.0.0.1", 5600)
    assert command.address("[::1]:5600") == Address("::1", 5600)


def test_the_command_line_knows_it(capsys):
    with pytest.raises(SystemExit):
        cli.main(["doctor", "--help"])
    assert "--peer HOST:PORT" in capsys.readouterr().out


def test_a_key_file_that_cannot_be_used_is_an_error(tmp_path, capsys):
    words = ("--side-channel-keys", str(tmp_path / "absent"), "--json")
    assert run(healthy(tmp_path), *words) == 2
    checks = {f["check"] for f in json.loads(capsys.readouterr().out)["findings"]
              if f["level"] == "error"}  # fmt: skip
    assert checks == {"network.keys"}


def test_every_finding_is_provoked_by_a_test():
    """By the name of its check, or of the part before what is filled in."""
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("*.py"))
    names = set()
    for path in Path(command.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            if called and node.func.id in ("error", "warning") and node.args:
                text = ast.unparse(node.args[0]).lstrip("f").strip("'")
                names.add(text.partition("{")[0])
    assert len(names) > 25
    # These read the name from a variable: each of the places is told apart in its own test file.
    names -= {"check"}
    left = {name for name in names if name not in tests}
    # Variables are listed by their own names.
    assert {name for name in left if name.rpartition(".")[2] not in tests} == set()
