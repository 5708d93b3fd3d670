"""`vllm bench serve`, run any number of times by one process that has loaded it.

Loading it takes longer than many a run. The parent side starts this module as a process and
hands it argument lists; the tool itself is called exactly as its command line calls it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Final, Self

from neuron_push.errors import NeuronPushError

START: Final = 180.0


class LoadFailed(NeuronPushError):
    """The load generator ended, or a run of it failed."""


class Load:
    """The process, for the parent."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.restart()
        return self

    def restart(self) -> None:
        """A fresh process, after one has ended or hung."""
        self.close()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=log, text=True, start_new_session=True,
            )  # fmt: skip
        try:
            self._hear(START)
        except BaseException:
            self.close()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, arguments: list[str], within: float) -> None:
        """One `vllm bench serve`; raises LoadFailed when it fails or takes longer."""
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(arguments) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise LoadFailed(f"vllm bench serve has ended; see {self._log}") from None
        answer = self._hear(within)
        if answer != "done":
            raise LoadFailed(f"vllm bench serve: {answer}; see {self._log}")

    def close(self) -> None:
        """End the process; it holds nothing that needs care."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _hear(self, within: float) -> str:
        """One line of the process. A timer ends a process that stays silent."""
        process = self._process
        assert process is not None and process.stdout is not None
        timer = threading.Timer(within, process.kill)
        timer.start()
        try:
            line = process.stdout.readline()
        finally:
            timer.cancel()
        if not line:
            raise LoadFailed(f"vllm bench serve ended or took over {within:.0f} s; see {self._log}")
        return line.strip()


def main() -> None:
    """The process: one list of arguments a line; answers with a line each."""
    answers: IO[str] = sys.stdout
    sys.stdout = sys.stderr  # what the tool prints goes to the log
    from vllm.benchmarks.serve import add_cli_args
    from vllm.benchmarks.serve import main as serve
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    def say(text: str) -> None:
        answers.write(text.replace("\n", " ") + "\n")
        answers.flush()

    say("ready")
    for line in sys.stdin:
        print(f"--- {time.strftime('%H:%M:%S')} {line}", file=sys.stderr)
        parser = FlexibleArgumentParser()
        add_cli_args(parser)
        try:
            serve(parser.parse_args(json.loads(line)))
        except SystemExit as error:
            say(f"refused its arguments (status {error.code})")
        except Exception as error:  # noqa: BLE001  the parent raises it again
            say(repr(error))
        else:
            say("done")


if __name__ == "__main__":
    main()
