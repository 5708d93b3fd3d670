"""Results of imagined runs, as files."""

import json

from neuron_push.bench.sweep.cells import Cell, Run

PREFILL = {"profile": "qwen3-32b-tp8-p5en"}


def write(folder, column, cell, repeat, ttft, tpot=0.006, *, fragmented=False, unfit=(), count=4):
    """One file of `count` equal requests; times in seconds."""
    run = Run(column, cell, repeat, fragmented)
    document = {
        "completed": count, "failed": 0, "num_prompts": count, "ttfts": [ttft] * count,
        "request_throughput": cell.qps, "duration": 1.0, "mean_ttft_ms": ttft * 1e3,
        "neuron_push": {
            "column": column, "repeat": repeat, "seed": run.seed, "fragmented": fragmented,
            "tpots": [tpot] * count, "handover": [ttft / 10] * count,
            "handover_token": [ttft / 5] * count, "to_last_forward": [ttft / 2] * count,
            "unfit": list(unfit),
            "setup": {"engines": {"prefill": PREFILL}, "commit": "abc"},
        },
    }  # fmt: skip
    path = folder / run.file
    path.write_text(json.dumps(document))
    return path


def study(folder, rounds=3):
    """Two cells, this connector twice as good as both of vLLM's."""
    for cell in (Cell(4096, 8.0, 64), Cell(16384, 1.0, 64)):
        for repeat in range(1, rounds + 1):
            noise = 1 + repeat / 100
            write(folder, "push", cell, repeat, 0.2 * noise)
            write(folder, "nixl-push", cell, repeat, 0.4)
            write(folder, "nixl-pull", cell, repeat, 0.5, 0.007)
            write(folder, "floor-ttft", cell, repeat, 0.19, 0.0)
            write(folder, "floor-tpot", cell, repeat, 0.01, 0.00599)
    return folder
