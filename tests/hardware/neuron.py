"""Trainium, in the order of the notes on Neuron: T1 to T6.

T1 to T4 need one device. T5 and T6 compare engines that are up already, since compiling a model
takes longer than this suite may: name them in NEURON_PUSH_ALONE_URL (one engine, no transfer),
NEURON_PUSH_PAIR_URL (a router before a trn2 pair) and NEURON_PUSH_MIXED_URL (before a mixed pair).
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import urllib.request

from neuron_push.backends import Attention
from neuron_push.layouts import Place
from tests.hardware import fabric
from tests.hardware.memory import Buffer
from tests.hardware.suite import Skip, check

MIB = 1 << 20
PROMPTS = ("The capital of France is", "def fibonacci(n):", "1, 2, 3, 4," * 40)


@check("neuron")
def t1_allocations_have_addresses():
    """Two allocations of 64 MiB: aligned, mapped, apart; which EFA device serves each."""
    os.environ.setdefault("NEURON_RT_MAP_HBM", "1")
    buffers = [Buffer("neuron", 64 * MIB) for _ in range(2)]
    regions = [buffer.region for buffer in buffers]
    low, high = sorted(regions, key=lambda region: region.base)
    assert low.base + low.length <= high.base, "two tensors share an allocation"
    buffers[0].accelerator.enter_thread()
    return {"bases": [hex(region.base) for region in regions],
            "lengths": [region.length for region in regions],
            "page_offsets": [region.base % 4096 for region in regions]}  # fmt: skip


@check("neuron")
def t1_pages_are_where_the_geometry_says():
    """A cache made as vLLM Neuron's runner makes it, read at the described addresses."""
    os.environ.setdefault("NEURON_RT_MAP_HBM", "1")
    return pages("neuron")


def pages(kind):
    """(2, B, H, N, D) over one raw allocation; ranges leave it by narrow and copy_ only."""
    torch = importlib.import_module("torch")
    shape = (2, 4, 2, 32, 64)
    host = torch.arange(math.prod(shape), dtype=torch.int32).reshape(shape)
    buffer = Buffer(kind, host.numel() * 4)
    buffer.write(host.reshape(-1).view(torch.uint8).numpy())
    cache = buffer.tensor.view(torch.int32).view(shape)
    backend = "CUSTOM" if kind == "neuron" else "NEURON_EMULATED"
    place = Place(0, 0, buffer.region.base)
    for plane in buffer.accelerator.planes(cache, Attention(backend), place):
        half = 0 if plane.kind == "k" else 1
        for page, head, token in [(0, 0, 0), (1, 1, 31), (3, 0, 7), (3, 1, 31)]:
            start = plane.offset + page * plane.page + head * plane.head + token * plane.token
            seen = buffer.read(start, plane.width * plane.channel).view("int32").tolist()
            expected = host[half, page, head, token].tolist()
            assert seen == expected, (plane.kind, page, head, token)
    return {"address": hex(buffer.region.base)}


@check("neuron")
def t2_device_memory_is_offered_after_the_runtime_starts():
    """NIXL's memory types before and after the runtime starts, each in a process of its own."""
    code = (
        "import sys, json\n"
        "from tests.hardware.memory import Buffer\n"
        "from neuron_push.nixl.binding import create_agent\n"
        "if sys.argv[1] == 'after': Buffer('neuron', 1 << 20)\n"
        "agent = create_agent('probe', ('LIBFABRIC',), 0)\n"
        "print(json.dumps(agent.get_backend_mem_types('LIBFABRIC')))\n"
    )
    found = {}
    for when in ("before", "after"):
        environment = {**os.environ, "NEURON_RT_MAP_HBM": "1", "NIXL_LOG_LEVEL": "DEBUG"}
        done = subprocess.run(
            [sys.executable, "-c", code, when],
            capture_output=True, text=True, timeout=120, check=False, env=environment,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        found[when] = json.loads(done.stdout.strip().splitlines()[-1])
        found[f"hmem {when}"] = [line for line in done.stderr.splitlines() if "HMEM" in line][:3]
    assert any("VRAM" in kind for kind in found["after"]), found
    return found


@check("neuron")
def t3_reads_then_writes_between_two_processes():
    """64 MiB READ, then 64 MiB written, each block's checksum; FI_EFA_ENABLE_SHM_TRANSFER=0."""
    found = apart("neuron", "LIBFABRIC", 64 * MIB, {"NEURON_RT_MAP_HBM": "1", **fabric.OVER_EFA})
    assert not found["wrong_blocks"], found
    return found


@check("neuron")
def t3_the_same_through_shared_memory():
    """The same without FI_EFA_ENABLE_SHM_TRANSFER=0, which we never run: for the record."""
    environment = {"NEURON_RT_MAP_HBM": "1", "FI_EFA_ENABLE_SHM_TRANSFER": "1"}
    try:
        return apart("neuron", "LIBFABRIC", 64 * MIB, environment)
    except AssertionError as failure:  # AWS says "inaccurate output"; it may as well refuse
        return {"failed": str(failure)[-500:]}


def apart(kind, backend, nbytes, environment, seconds=60):
    """`fabric.read_then_write` from a process of its own: libfabric reads the variable once."""
    code = (
        "import json, sys\n"
        "from tests.hardware import fabric\n"
        "kind, backend, nbytes, environment = json.loads(sys.argv[1])\n"
        "print(json.dumps(fabric.read_then_write(kind, backend, nbytes, environment)))\n"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", code, json.dumps([kind, backend, nbytes, environment])],
            capture_output=True, text=True, timeout=seconds, check=False,
            env={**os.environ, **environment},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise AssertionError(f"no end within {seconds} s") from None
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.strip().splitlines()[-1])


@check("neuron")
def t4_a_part_of_an_allocation():
    """Whether NIXL registers an interior slice, which we never ask for: for the record."""
    from neuron_push.geometry import Region
    from neuron_push.nixl import NixlFactory
    from neuron_push.transport import AgentName

    whole = Buffer("neuron", 64 * MIB)
    inner = Region(whole.region.base + 4 * MIB, 4 * MIB, "VRAM", whole.region.device)
    try:
        NixlFactory(("LIBFABRIC",))(AgentName("hardware/slice"), [inner]).close()
    except Exception as refusal:  # noqa: BLE001  whatever it says is the finding
        return {"interior slice": f"refused: {refusal}"}
    return {"interior slice": "registered (dmabuf v2)"}


@check("neuron")
def t5_a_pair_answers_as_one_engine_does():
    """Greedy completions of a trn2 pair equal those of an engine without transfers."""
    return same_answers("NEURON_PUSH_PAIR_URL")


@check("neuron")
def t6_a_mixed_pair_answers_as_one_engine_does():
    """The same for a pair of unlike machines, whose pages are re-interleaved on the way."""
    return same_answers("NEURON_PUSH_MIXED_URL")


def same_answers(variable, environ=os.environ):
    alone, pushed = environ.get("NEURON_PUSH_ALONE_URL"), environ.get(variable)
    if not alone or not pushed:
        raise Skip(f"set NEURON_PUSH_ALONE_URL and {variable} to engines that are up")
    for prompt in PROMPTS:
        expected, seen = complete(alone, prompt), complete(pushed, prompt)
        assert seen == expected, f"{prompt[:30]!r}: {seen!r} instead of {expected!r}"
    return {"prompts": len(PROMPTS)}


def complete(url, prompt):
    with urllib.request.urlopen(f"{url.rstrip('/')}/v1/models", timeout=20) as answer:
        model = json.load(answer)["data"][0]["id"]
    body = {"model": model, "prompt": prompt, "max_tokens": 32, "temperature": 0, "seed": 1}
    request = urllib.request.Request(
        f"{url.rstrip('/')}/v1/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["choices"][0]["text"]
