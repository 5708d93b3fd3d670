"""EFA: WRITEs between two processes of this machine, over LIBFABRIC."""

from __future__ import annotations

import os

import numpy as np

from tests.hardware import gpu
from tests.hardware.memory import HOST
from tests.hardware.pair import digest, pair, random_bytes
from tests.hardware.suite import Skip, check, present

MIB = 1 << 20
# Without it two processes of one host would not use EFA between them at all.
OVER_EFA = {"FI_EFA_ENABLE_SHM_TRANSFER": "0"}


def device_kind():
    here = present()
    return "neuron" if "neuron" in here else "cuda" if "cuda" in here else HOST


@check("efa")
def small_writes_complete_over_two_rails():
    """WRITEs of a few KiB, one to 64 pieces, below and around the striping threshold.

    NIXL issue 1862: on two rails small batches never completed at the receiver.
    """
    os.environ.update(OVER_EFA)
    return small_writes(device_kind(), "LIBFABRIC")


def small_writes(kind, backend, rounds=3):
    random = np.random.default_rng(11)
    slowest, count = 0.0, 0
    with pair(kind, 4 * MIB, backend, OVER_EFA) as found:
        data = random.integers(0, 256, 4 * MIB, np.uint8)
        found.buffer.write(data)
        for turn in range(rounds):
            for pieces in (1, 2, 3, 16, 64):
                for size in (64, 1024, 8192):
                    places = random.permutation(4 * MIB // 8192)[: 2 * pieces] * 8192
                    moves = [
                        (int(s), int(d), size)
                        for s, d in zip(places[:pieces], places[pieces:], strict=True)
                    ]
                    name = b"%d/%d/%d" % (turn, pieces, size)
                    slowest = max(slowest, found.write(moves, name))
                    for source, destination, length in moves[:4]:
                        sent = digest(data[source : source + length])
                        assert found.digest(destination, length) == sent, name
                    count += 1
    return {"writes": count, "slowest_ms": 1000 * slowest}


@check("efa")
def a_large_write_arrives_whole():
    """256 MiB in slices of 16 MiB: every block's checksum, and the rate."""
    os.environ.update(OVER_EFA)
    return large_write(device_kind(), "LIBFABRIC", 256 * MIB)


def large_write(kind, backend, nbytes, slice_bytes=16 * MIB):
    with pair(kind, nbytes, backend, OVER_EFA) as found:
        data = np.random.default_rng(13).integers(0, 256, nbytes, np.uint8)
        found.buffer.write(data)
        seconds = 0.0
        for start in range(0, nbytes, slice_bytes):
            seconds += found.write([(start, start, slice_bytes)], b"%d" % start)
        for start in range(0, nbytes, MIB):
            assert found.digest(start, MIB) == digest(data[start : start + MIB]), start
    return {"bytes": nbytes, "gb_s": nbytes / seconds / 1e9}


def read_then_write(kind, backend, nbytes, environment, slice_bytes=16 * MIB):
    """READ all that the other process has, then WRITE other bytes there; each block's checksum."""
    seconds = {}
    with pair(kind, nbytes, backend, environment) as found:
        spans = [(start, start, slice_bytes) for start in range(0, nbytes, slice_bytes)]
        theirs = found.fill(17)
        seconds["read"] = sum(found.read([span]) for span in spans)
        wrong = [
            ("READ", start)
            for start in range(0, nbytes, MIB)
            if digest(found.buffer.read(start, MIB)) != digest(theirs[start : start + MIB])
        ]
        ours = random_bytes(19, nbytes)
        found.buffer.write(ours)
        seconds["write"] = sum(found.write([span], b"%d" % span[0]) for span in spans)
        wrong += [
            ("WRITE", start)
            for start in range(0, nbytes, MIB)
            if found.digest(start, MIB) != digest(ours[start : start + MIB])
        ]
    rates = {f"{name}_gb_s": nbytes / taken / 1e9 for name, taken in seconds.items()}
    return {"bytes": nbytes, "wrong_blocks": wrong, **rates}


@check("efa")
def a_write_after_the_fence_never_carries_old_bytes():
    """A GPU writes new bytes behind a long kernel; a WRITE posted after its fence carries them."""
    if device_kind() != "cuda":
        raise Skip("needs a GPU: a Neuron graph hides its end, and its fence is the step's output")
    os.environ.update(OVER_EFA)
    torch = gpu.torch_on_gpu()
    return write_after_fence("cuda", "LIBFABRIC", lambda: gpu.busy(torch))


def write_after_fence(kind, backend, delay, rounds=5):
    with pair(kind, 8 * MIB, backend, OVER_EFA) as found:
        for value in range(1, rounds + 1):
            delay()
            found.buffer.tensor.fill_(value)
            fence = found.buffer.accelerator.record_fence()
            assert fence.wait(20.0)
            found.write([(0, 0, 8 * MIB)], b"%d" % value)
            assert found.digest(0, 8 * MIB) == digest(np.full(8 * MIB, value, np.uint8)), value
    return {"rounds": rounds}


@check("efa")
def rails_are_reported():
    """NIXL's debug lines name the EFA devices that serve this machine's memory."""
    from neuron_push.doctor import backends
    from neuron_push.doctor.machine import Machine

    findings = list(backends.one(Machine(), "LIBFABRIC"))
    assert all(finding.level != "error" for finding in findings), findings
    return {finding.check: finding.seen for finding in findings}
