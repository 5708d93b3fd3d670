"""A prefill and a decode engine of `bench hooks` that serve one request at a time."""

from __future__ import annotations

import time
from typing import Any, Final

OURS: Final = "NeuronPushConnector"
PUSH: Final = "NixlPushConnector"
PULL: Final = "NixlConnector"
NO_OP: Final = "no-op"
# Kinds of steps that worked for a request; the others were quiet, or waited.
WORK: Final = ("chunk", "end", "report", "admit")


class Pair:
    """A prefill and a decode engine that serve one request at a time."""

    def __init__(self, name: str, prefill: Any, decode: Any) -> None:
        self._name = name
        self._sides = (prefill, decode)
        self._number = 0

    def quiet(self, steps: int = 300) -> dict[str, list[Any]]:
        """Steps of a plain request's decoding, in which no connector has anything to do."""
        found = {}
        for label, side in zip("PD", self._sides, strict=True):
            leg = side.add(list(range(8)), None, f"plain-{label}", steps)
            taken = []
            while side.busy:
                taken.append(side.step())
            side.drop(leg)
            found[label] = taken[5:-2]
        return found

    def request(self, tokens: int) -> dict[str, list[Any]]:
        """Push one prompt; the steps of each side that worked for it."""
        prefill, decode = self._sides
        self._number += 1
        name, transfer = f"cmpl-{self._number}-0-aaaaaaaa", f"t{self._number}"
        prompt = [(self._number + 7 * i) % 4000 for i in range(tokens)]
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": transfer}
        legs = [prefill.add(prompt, params, name, 1)]
        if self._name != PULL:
            place = prefill.engine_id, prefill.port
            told = None if self._name == NO_OP else ahead(self._name, *place, name, transfer)
            legs.append(decode.add(prompt, told, name, 1))
        deadline = time.monotonic() + 60
        while len(legs) < 2 or prefill.busy or decode.busy:
            if prefill.busy:
                prefill.step()
            if decode.busy:
                decode.step()
            if len(legs) < 2 and prefill.answers:
                legs.append(decode.add(prompt, prefill.answers.pop(), name, 1))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._name}: {name} did not end")
            time.sleep(0.001)
        prefill.answers.clear()
        prefill.drop(legs[0])
        decode.drop(legs[1])
        self._check(legs[1])
        return {
            label: [s for s in leg.steps if s.kind in WORK]
            for label, leg in zip("PD", legs, strict=True)
        }

    def _check(self, leg: Any) -> None:
        """A request that was computed or failed on D has measured something else."""
        kinds = [step.kind for step in leg.steps]
        if self._name != NO_OP and ("report" not in kinds or kinds.count("chunk") != 1):
            raise RuntimeError(f"{self._name}: the KV did not arrive ({kinds})")


def ahead(connector: str, engine: str, port: int, request: str, transfer: str) -> dict[str, Any]:
    """What a proxy tells D while P computes."""
    return {
        "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": transfer,
        "remote_engine_id": engine, "remote_request_id": request,
        "remote_host": "127.0.0.1" if connector == OURS else "localhost",
        "remote_port": port, "remote_block_ids": None, "tp_size": 1, "pp_size": 1,
    }  # fmt: skip
