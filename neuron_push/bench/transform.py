"""`neuron-push bench transform`: packing and unpacking against memcpy of the same bytes.

One rank of an imagined engine pair, Neuron pages on one side and interleaved ones on the other,
moves a prompt through one slab, piece by piece, as transfers do. The baseline copies the same
bytes between the same pages and the same slab, without changing their order.

What a prompt takes besides its pages is measured too: the most that the process had resident while
it moved through a slab that nobody had touched, which is to be the slab and little else.
"""

from __future__ import annotations

import argparse
import json as jsonlib
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np

from neuron_push.config import Config
from neuron_push.geometry import Geometry, Group, Plane, Region
from neuron_push.hostmover import HostMover, load_machine_code
from neuron_push.layouts import Place, View, interleaved, split_first
from neuron_push.plan import Ask, Blocks, StagedPlan, staged

__all__ = ["add_arguments", "main", "run"]

LAYERS: Final = 64
CHANNELS: Final = 128
ELEMENT: Final = 2
TOKENS: Final = {"neuron": 32, "interleaved": 16}  # per block
# Beside the slab, for addresses of one piece's rows: a share of it.
SPARE: Final = 0.1
TARGET: Final = {"contiguous": 0.7, "fragmented": 0.35}

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (4096)")
    parser.add_argument("--repeat", type=int, default=15, help="timed rounds per case (15)")
    parser.add_argument(
        "--slab", type=int, default=Config().staging_slab_bytes, help="bytes of the slab"
    )


def main(args: argparse.Namespace) -> int:
    """Entry for the command line; exit status 1 if a case misses its target."""
    report = run(args.json, tokens=args.tokens, repeat=args.repeat, slab=args.slab)
    return 0 if all(case["within_target"] for case in report["cases"].values()) else 1


def run(json: bool, *, tokens: int, repeat: int, slab: int) -> dict[str, Any]:
    """Measure, print and return the report; times are in milliseconds, the best of all rounds."""
    cases = {}
    machine_code = load_machine_code()
    if not (machine_code or json):
        print("Without Numba: NumPy alone copies.")
    ways: tuple[tuple[str, str, Literal["packed", "unpacked"]], ...] = (
        ("neuron", "interleaved", "packed"),
        ("neuron", "interleaved", "unpacked"),
        ("interleaved", "neuron", "packed"),
        ("interleaved", "neuron", "unpacked"),
    )
    for source, target, way in ways:
        for blocks in TARGET:
            name = f"{source} to {target}, {way}, {blocks}"
            cases[name] = _case(source, target, way, blocks, tokens, repeat, slab)
            if not json:
                print(_line(name, cases[name]))
    report = {
        "bench": "transform",
        "config": {"layers": LAYERS, "head_size": CHANNELS, "element_bytes": ELEMENT,
                   "tokens": tokens, "slab_bytes": slab, "repeat": repeat,
                   "machine_code": machine_code},
        "cases": cases,
    }  # fmt: skip
    if json:
        print(jsonlib.dumps(report))
    return report


def _line(name: str, case: dict[str, Any]) -> str:
    peak = case["peak_bytes"]
    memory = "not measured" if peak is None else f"{peak / 2**20:.1f} MiB"
    return (
        f"{name:<46} {case['bytes'] >> 20} MiB  {case['gib_per_s']:.1f} GiB/s, memcpy "
        f"{case['memcpy_gib_per_s']:.1f}  {case['ratio']:.2f}x  slab of "
        f"{case['slab_bytes'] / 2**20:.1f} MiB, peak {memory}  "
        f"{'ok' if case['within_target'] else 'BELOW TARGET'}"
    )


@dataclass(frozen=True, slots=True)
class Pool:
    """The pages of one side: one allocation per layer."""

    geometry: Geometry
    memory: list[Bytes]
    blocks: list[Blocks]


def _pool(layout: str, tokens: int, order: str, seed: int) -> Pool:
    """Pages for a prompt and as many more, filled."""
    size = TOKENS[layout]
    count = tokens // size
    pool = 2 * count + 1
    memory, regions, planes = [], [], list[Plane]()
    for layer in range(LAYERS):
        array = _memory(2 * pool * size * CHANNELS * ELEMENT)
        base = array.ctypes.data
        place = Place(layer, layer, base)
        page = size * CHANNELS
        if layout == "neuron":
            shape = (2, pool, 1, size, CHANNELS)
            view = View(shape, (pool * page, page, page, CHANNELS, 1), base, ELEMENT)
            planes += split_first(view, place)
        else:
            strides = (2 * page, 2 * page, 2 * CHANNELS, 1)
            view = View((pool, 1, size, 2 * CHANNELS), strides, base, ELEMENT)
            planes += interleaved(view, place)
        memory.append(array)
        regions.append(Region(base, array.nbytes, "DRAM", 0))
    ids = np.arange(1, count + 1, dtype=np.int32)
    if order == "fragmented":
        ids = 2 * np.random.default_rng(seed).permutation(count).astype(np.int32) + 1
    group = Group("full", size, size, pool, (0,), tuple(planes))
    return Pool(Geometry(tuple(regions), (group,), ELEMENT), memory, [Blocks(0, ids)])


def _memory(nbytes: int) -> Bytes:
    """Whole pages, as allocators give to tensors of this size."""
    array = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    array[:] = np.arange(nbytes) % 251
    return array


def _case(
    source: str,
    target: str,
    way: Literal["packed", "unpacked"],
    order: str,
    tokens: int,
    repeat: int,
    slab: int,
) -> dict[str, Any]:
    prefill, decode = _pool(source, tokens, order, 1), _pool(target, tokens, order, 2)
    plan = staged(prefill.geometry, decode.geometry, Ask(((0,),)), way, slab, min_run=1)
    area = _memory(plan.slab_bytes)
    pieces = [(at, min(at + plan.tokens, tokens)) for at in range(0, tokens, plan.tokens)]
    lists = prefill.blocks, decode.blocks
    mover = HostMover()

    def transform(piece: tuple[int, int], slab: Bytes = area) -> None:
        mover.move(plan.rows(*piece, *lists, slab.ctypes.data, pack=plan.packs))

    pages = prefill if way == "packed" else decode
    took, memcpy = _best((transform, _baseline(plan, pages, area)), pieces, repeat)
    untouched = np.frombuffer(mmap.mmap(-1, plan.slab_bytes), np.uint8)

    def whole_prompt() -> None:
        for piece in pieces:
            transform(piece, untouched)

    peak = _grown(whole_prompt)
    nbytes = LAYERS * 2 * CHANNELS * ELEMENT * tokens
    return {
        "bytes": nbytes,
        "pieces": len(pieces),
        "transform_ms": took * 1e3,
        "memcpy_ms": memcpy * 1e3,
        "gib_per_s": nbytes / took / 2**30,
        "memcpy_gib_per_s": nbytes / memcpy / 2**30,
        "ratio": memcpy / took,
        "slab_bytes": plan.slab_bytes,
        "peak_bytes": peak,
        "within_target": memcpy / took >= TARGET[order]
        and (peak is None or peak <= plan.slab_bytes * (1 + SPARE)),
    }


def _grown(call: Callable[[], object]) -> int | None:
    """The most bytes resident during a call beyond those before; None where Linux does not say."""
    try:
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")  # the peak is what is resident now
        before = _status("VmRSS")
        call()
        return _status("VmHWM") - before
    except OSError:
        return None


def _status(field: str) -> int:
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) << 10


def _baseline(plan: StagedPlan, pool: Pool, area: Bytes) -> Callable[[tuple[int, int]], None]:
    """The same bytes of every layer in one stretch, to or from the same slab."""
    token = 2 * CHANNELS * ELEMENT

    def copy(piece: tuple[int, int]) -> None:
        start, stop = piece
        size = (stop - start) * token
        for layer, memory in enumerate(pool.memory):
            pages = memory[start * token : stop * token]
            slab = area[layer * size : (layer + 1) * size]
            if plan.way == "packed":
                slab[:] = pages
            else:
                pages[:] = slab

    return copy


Piece = tuple[int, int]


def _best(
    calls: tuple[Callable[[Piece], None], Callable[[Piece], None]],
    pieces: list[Piece],
    repeat: int,
) -> tuple[float, float]:
    """Processor seconds of each call over all pieces, each piece in its fastest round.

    Both run on one thread, so what else the machine computes does not count; they take turns, so
    both see the same contention for its memory.
    """
    best = [[float("inf")] * len(pieces) for _ in calls]
    for _ in range(repeat + 1):  # the first round warms up and is rarely the fastest
        for call, fastest in zip(calls, best, strict=True):
            for index, piece in enumerate(pieces):
                began = time.thread_time()
                call(piece)
                fastest[index] = min(fastest[index], time.thread_time() - began)
    return sum(best[0]), sum(best[1])
