"""One CUDA GPU and PyTorch. `device` is an argument so that host tensors can stand in."""

from __future__ import annotations

import importlib
import threading
import time

import numpy as np

from neuron_push.backends import Attention
from neuron_push.errors import ConfigError
from neuron_push.layouts import Place
from neuron_push.transform import Rows
from tests.hardware.memory import accelerator_of
from tests.hardware.suite import Skip, check

PAGES, HEADS, TOKENS, WIDTH = 64, 8, 16, 128


def torch_on_gpu():
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Skip(f"PyTorch does not import: {error}") from error
    if not torch.cuda.is_available():
        raise Skip("PyTorch sees no GPU")
    return torch


def accelerator(device):
    return accelerator_of("cpu" if device == "cpu" else "cuda")


def raw_view(accelerator, device):
    """Flat bytes at an address, as the mover sees them."""
    if device == "cpu":
        import ctypes

        torch = importlib.import_module("torch")

        def host(address, length):
            memory = (ctypes.c_uint8 * length).from_address(address)
            return torch.frombuffer(memory, dtype=torch.uint8)

        return host
    return accelerator.mover()._view


# ------------------------------------------------------------------------------- geometry


@check("cuda")
def flash_attn_pages_are_where_the_geometry_says():
    """Read K and V at the described addresses and compare with the framework's own indexing."""
    torch_on_gpu()
    return geometry_of_pages("cuda:0")


def geometry_of_pages(device):
    """For each physical order of the logical (B, H, N, 2D) view that vLLM makes."""
    torch = importlib.import_module("torch")
    found = accelerator(device)
    view = None
    for order in [(0, 1, 2, 3), (0, 2, 1, 3)]:  # LBHNC and LBNHC
        sizes = [(PAGES, HEADS, TOKENS, 2 * WIDTH)[axis] for axis in order]
        storage = torch.empty(sizes, dtype=torch.bfloat16, device=device)
        cache = storage.permute([order.index(axis) for axis in range(4)])
        cache.copy_(torch.randn(cache.shape, device=device))
        base, length = found.region(cache)
        key, value = found.planes(cache, Attention("FLASH_ATTN"), Place(0, 0, base))
        view = raw_view(found, device)
        flat = view(base, length).view(torch.bfloat16)
        for plane, channels in [(key, slice(0, WIDTH)), (value, slice(WIDTH, 2 * WIDTH))]:
            strides = [n // 2 for n in (plane.page, plane.head, plane.token, plane.channel)]
            seen = torch.as_strided(flat, (PAGES, HEADS, TOKENS, WIDTH), strides, plane.offset // 2)
            assert torch.equal(seen, cache[..., channels]), f"{plane.kind} in order {order}"
    return {"orders": 2}


@check("cuda")
def a_region_is_the_whole_allocation():
    """Views of one allocation give its base; memory of an expandable segment is refused."""
    torch = torch_on_gpu()
    found = accelerator("cuda:0")
    whole = torch.empty(64 << 20, dtype=torch.uint8, device="cuda:0")
    assert found.region(whole) == found.region(whole[4096:8192])
    assert found.region(whole)[0] == whole.data_ptr()
    return {"expandable": expandable(torch, found)}


def expandable(torch, found):
    switch = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if switch is None:
        return "this PyTorch cannot switch"
    switch("expandable_segments:True")
    try:
        tensor = torch.empty(96 << 20, dtype=torch.uint8, device="cuda:0")
        try:
            found.region(tensor)
        except ConfigError as refusal:
            assert "expandable segment" in str(refusal)
            return "refused"
        segments = torch.cuda.memory_snapshot()
        assert not any(s.get("is_expandable") for s in segments), "not noticed"
        return "this driver has none"
    finally:
        switch("expandable_segments:False")


# ------------------------------------------------------------------------------- events


@check("cuda")
def a_fence_is_done_when_the_work_before_it_is():
    """Recording returns at once; polling from another thread follows the device, not the host."""
    torch = torch_on_gpu()
    found = accelerator("cuda:0")
    target = torch.zeros(1 << 20, dtype=torch.int32, device="cuda:0")
    torch.cuda.synchronize()
    began = time.monotonic()
    busy(torch)
    target.fill_(7)
    fence = found.record_fence()
    launched = time.monotonic() - began
    early = fence.done()
    answers = []
    thread = threading.Thread(target=lambda: answers.append(fence.wait(20.0)))
    thread.start()
    thread.join()
    ended = time.monotonic() - began
    assert answers == [True] and fence.done()
    assert not early, "the event was done before its work could be"
    assert launched < ended / 2, f"launching took {launched:.3f} of {ended:.3f} s"
    return {"launched_ms": 1000 * launched, "done_ms": 1000 * ended}


@check("cuda")
def packing_after_the_fence_never_carries_old_bytes():
    """New bytes are written behind a long kernel; a pack after the fence sees only new ones."""
    torch = torch_on_gpu()
    found = accelerator("cuda:0")
    pages = torch.zeros(8 << 20, dtype=torch.uint8, device="cuda:0")
    found.region(pages)
    slab = found.slab(1 << 20)
    moving = found.mover()
    for value in range(1, 6):
        busy(torch)
        pages.fill_(value)
        fence = found.record_fence()
        assert fence.wait(20.0)
        places = pages.data_ptr() + 8192 * np.random.default_rng(value).permutation(1024)[:128]
        moved = moving.move([Rows(8192, 8192, 128, places.astype(np.int64), slab.base)])
        deadline = time.monotonic() + 20
        while not moved.done():
            assert time.monotonic() < deadline
        assert bool((slab.owner == value).all()), f"old bytes in round {value}"
    return {"rounds": 5}


def busy(torch, milliseconds=200):
    """Keep the current stream at work; about 2 GHz."""
    torch.cuda._sleep(milliseconds * 2_000_000)


# ------------------------------------------------------------------------------- packing


@check("cuda")
def rows_are_packed_and_unpacked_as_indexing_does():
    """Gather, scatter and both, units from 1 byte to 256 KiB, against PyTorch's indexing."""
    torch_on_gpu()
    return pack_and_unpack("cuda:0")


def pack_and_unpack(device):
    torch = importlib.import_module("torch")
    found = accelerator(device)
    random = np.random.default_rng(3)
    for unit in (1, 2, 16, 256, 4096, 256 << 10):
        count = 64 if unit > 4096 else 500
        pages = torch.randint(0, 256, (2 * count, unit), dtype=torch.uint8, device=device)
        found.region(pages)
        moving = found.mover()
        dense = torch.zeros((count, unit), dtype=torch.uint8, device=device)
        back = torch.zeros_like(pages)
        index = random.permutation(2 * count)[:count].astype(np.int64)
        finish(device)
        run(moving, Rows(unit, unit, count, pages.data_ptr() + index * unit, dense.data_ptr()))
        assert torch.equal(dense, pages[torch.from_numpy(index)]), f"packing units of {unit}"
        run(moving, Rows(unit, unit, count, dense.data_ptr(), back.data_ptr() + index * unit))
        expected = torch.zeros_like(pages)
        expected[torch.from_numpy(index)] = dense
        assert torch.equal(back, expected), f"unpacking units of {unit}"
    return {"units": 6}


def run(moving, rows):
    moved = moving.move([rows])
    deadline = time.monotonic() + 20
    while not moved.done():
        assert time.monotonic() < deadline, "a move did not end"
        time.sleep(1e-4)


def finish(device):
    if device != "cpu":
        importlib.import_module("torch").cuda.synchronize()


@check("cuda")
def transform_speed():
    """Neuron pages to FLASH_ATTN pages (rows of 256 bytes) against a copy of the same bytes."""
    torch_on_gpu()
    return speed("cuda:0", pages=2048)


def speed(device, pages):
    torch = importlib.import_module("torch")
    found = accelerator(device)
    row = 2 * WIDTH
    count = pages * HEADS * TOKENS
    source = torch.randint(0, 256, (count * row,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    found.region(source)
    moving = found.mover()
    order = np.random.default_rng(5).permutation(count).astype(np.int64)
    rows = Rows(row, row, count, source.data_ptr(), target.data_ptr() + order * row)
    run(moving, rows)
    seconds = {"transform": best(lambda: run(moving, rows)), "copy": None}

    def copy():
        target.copy_(source)
        finish(device)

    seconds["copy"] = best(copy)
    size = count * row
    return {
        "bytes": size,
        "transform_gb_s": size / seconds["transform"] / 1e9,
        "copy_gb_s": size / seconds["copy"] / 1e9,
        "ratio": seconds["copy"] / seconds["transform"],
    }


def best(work, rounds=5):
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


@check("cuda")
def a_new_thread_works_on_the_device_of_the_caches():
    """CUDA's current device belongs to a thread; a transfer thread must not stay on device 0."""
    torch = torch_on_gpu()
    last = torch.cuda.device_count() - 1
    found = accelerator("cuda:0")
    found.region(torch.empty(1 << 20, dtype=torch.uint8, device=f"cuda:{last}"))
    seen = []

    def body():
        found.enter_thread()
        seen.append(torch.cuda.current_device())

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    assert seen == [last]
    return {"device": last}
