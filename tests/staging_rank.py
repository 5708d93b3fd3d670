"""A process with one engine rank at a time over real NIXL, its KV in tensors of a given layout.

UCX is told to use tcp, where the bytes of a WRITE really travel.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

# No child outlives this, whatever becomes of the test.
LIFE = 600
ENVIRONMENT = {"UCX_TLS": "tcp,self", "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}


class Rank:
    """The parent's end; every method of `_Commands` is a `call` away."""

    def __init__(self):
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        saved = dict(os.environ)
        os.environ.update(ENVIRONMENT)
        try:
            self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self.process.start()
        finally:
            os.environ.clear()
            os.environ.update(saved)
        theirs.close()

    def call(self, command, *arguments, **options):
        self._pipe.send((command, arguments, options))
        if not self._pipe.poll(60):
            raise AssertionError(f"{command}: the process did not answer")
        failed, result = self._pipe.recv()
        if failed:
            raise AssertionError(f"{command} failed in the process: {result}")
        return result

    def kill(self):
        self.process.kill()
        self.process.join(10)


class _Commands:
    def __init__(self):
        self.thread = self.listener = self.engine = None

    def open(
        self, name, role, *, slabs=0, slab_bytes=1 << 16, min_run=2048, host_staging=False,
        kv_digest=False, fault="", state=0, **shape,
    ):  # fmt: skip
        """Start the rank; returns where its engine answers.

        With `host_staging` its pages are a Neuron device's, that nobody registers. With `state` it
        has state layers too, and that block holds the state of the request.
        """
        import numpy as np

        from neuron_push.config import Config
        from neuron_push.geometry import Region
        from neuron_push.hostmover import HostMover, load_machine_code
        from neuron_push.nixl import factory
        from neuron_push.plan import ways
        from neuron_push.protocol import EngineInfo, Slabs
        from neuron_push.rendezvous import Identity
        from neuron_push.sidechannel import Listener
        from neuron_push.transfer import TransferThread
        from tests import fleet, oracle
        from tests.rendezvous.shapes import SEMANTICS

        ways.FEW_COPIES = 0  # prompts are short here
        self.engine = fleet.engine(**shape)
        geometry, self.states, self.state = self.engine.geometries[0], None, state
        if state:
            self.states = oracle.States((7, 8), state + 3)
            geometry = fleet.with_states(geometry, self.states)
        memory, opens, mover = None, factory(("UCX",), fault=fault), HostMover
        if host_staging:
            staged, base = _behind_host_memory(self.engine, slabs * slab_bytes)
            memory = Slabs(Region(base, slabs * slab_bytes, "DRAM", 0), slab_bytes, True)
            opens, mover = staged.transports(opens, slabs, slab_bytes), staged.mover
        elif slabs:
            load_machine_code()  # its compiler takes 100 MiB, which are no staging memory
            self.staging = np.full(slabs * slab_bytes, 0x5A, np.uint8)
            region = Region(self.staging.ctypes.data, self.staging.nbytes, "DRAM", 0)
            memory = Slabs(region, slab_bytes)
        me = Identity(name, 0, os.getpid(), SEMANTICS, geometry, memory)
        info = EngineInfo(name, 1, role, 1, 1, 1, 0, ("push",), SEMANTICS, ())
        self.listener = Listener(name, "127.0.0.1", 0, lambda: info)
        config = Config(min_run=min_run, patience=20.0, lease=20.0, kv_digest=kv_digest)
        self.thread = TransferThread(config, me, opens, self.listener.address, make_mover=mover)
        self.thread.start()
        self.heard = []
        return self.listener.address

    def close(self):
        self.thread.close()
        self.listener.close()
        return list(self.thread._core._context.slabs.used)

    def fill(self, stop):
        from tests import oracle

        engine = self.engine
        for cache in engine.caches:
            oracle.fill(cache, engine.blocks, engine.block_tokens, engine.first, stop)
        if self.states:
            self.states.fill(self.state)

    def lists(self, first, stop):
        """Blocks number first to stop, and the state's with those from 0 on: firsts, packed ids."""
        from neuron_push.commands import pack_ids

        firsts, ids = (first,), (pack_ids(list(self.engine.blocks[first:stop])),)
        if self.states:
            begun = int(first > 0)
            return (*firsts, begun), (*ids, pack_ids([self.state][begun:]))
        return firsts, ids

    def prefill(self, match, edges, chunk_s=0.0):
        """Offer, settle in chunks, retire."""
        from neuron_push.commands import Offer, Retire, Settle, encode

        size = self.engine.block_tokens
        self.thread.submit(encode([Offer(1, "p", match)]))
        known = 0
        for stop in edges:
            count = -(-stop // size)
            settled = Settle(1, stop, *self.lists(known, count), 71, stop == match.tokens)
            self.thread.submit(encode([settled]))
            known = count
            time.sleep(chunk_s)
        self.thread.submit(encode([Retire(1, "finished")]))

    def receive(self, address, match, start):
        """Register; remembers what the pages held before."""
        from neuron_push.commands import Receive, encode, pack_ids

        self.remember()
        firsts, ids = self.lists(start // self.engine.block_tokens, len(self.engine.blocks))
        if self.states:
            firsts, ids = (firsts[0], 0), (ids[0], pack_ids([self.state]))
        wanted = Receive(1, "r", address, "", match, start, match.tokens, firsts, ids, 72, 20)
        self.thread.submit(encode([wanted]))

    def remember(self):
        """What the pages hold before anything arrives."""
        from tests import oracle

        self.before = oracle.snapshot(self.engine.caches[0])
        self.states_before = self.states.snapshot() if self.states else None

    def prefill_many(self, matches):
        """The same blocks, as the prompt of each match."""
        from neuron_push.commands import Offer, Retire, Settle, encode, pack_ids

        blocks = pack_ids(list(self.engine.blocks))
        for number, match in enumerate(matches, 1):
            settle = Settle(number, match.tokens, (0,), (blocks,), 1000 + number, True)
            self.thread.submit(encode([Offer(number, f"p{number}", match), settle]))
            self.thread.submit(encode([Retire(number, "finished")]))

    def receive_many(self, address, matches):
        """The same blocks, registered for each match at once."""
        from neuron_push.commands import Receive, encode, pack_ids

        self.watch()
        blocks = pack_ids(list(self.engine.blocks))
        self.thread.submit(encode([
            Receive(number, f"r{number}", address, "", match, 0, match.tokens, (0,), (blocks,),
                    2000 + number, 60)
            for number, match in enumerate(matches, 1)
        ]))  # fmt: skip

    def watch(self):
        """From now on, remember the most slabs and the most memory in use."""
        pool = self.thread._core._context.slabs
        serve, self.most_slabs = pool.serve, 0

        def watched(now):
            serve(now)
            self.most_slabs = max(self.most_slabs, len(pool.used))

        pool.serve = watched
        with open("/proc/self/clear_refs", "w") as peak:
            peak.write("5")
        self.resident = _resident("VmRSS")

    def watched(self):
        """The most slabs in use, and bytes of memory beyond what was resident before."""
        return self.most_slabs, _resident("VmHWM") - self.resident

    def hear(self, kind, seconds=20.0, count=1):
        """Wait for so many reports of this kind; the text of one."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self.thread.wait(0.05)
            self.heard += self.thread.take()
            found = [report for report in self.heard if type(report).__name__ == kind]
            if len(found) >= count:
                return str(found[0])
        raise AssertionError(f"no {kind} within {seconds} s; heard {self.heard}")

    def compare(self, start, stop):
        """Every wanted element is there, by the framework's own indexing, and nothing else."""
        from tests import oracle

        engine = self.engine
        oracle.compare(
            engine.caches[0], self.before, engine.blocks, engine.block_tokens, engine.first,
            start, stop,
        )  # fmt: skip
        if self.states:
            self.states.compare(self.states_before, self.state)

    def way(self):
        """How the first link of this prefill rank writes."""
        return next(link.plan.way for link in self.thread._core.links if link.plan)


def _behind_host_memory(engine, nbytes):
    """The stores of an engine as memory of a device that takes narrow and copy_ only; slabs."""
    from types import SimpleNamespace

    from neuron_push.bounce import HostStaged
    from neuron_push.tensors import whole_allocation
    from tests.devices.tensors import HostBytes, NeuronBytes

    inner = SimpleNamespace(
        can_reorder=False, name="neuron", hides_end=True,
        region=lambda tensor: whole_allocation(tensor, ""),
    )  # fmt: skip
    staged = HostStaged(
        inner,
        lambda size: HostBytes(memoryview(bytearray(size))),
        lambda store: NeuronBytes(memoryview(store.view(-1).numpy()).cast("B")),
    )
    for cache in engine.caches:
        for store in cache.stores:
            staged.region(store)
    return staged, staged.slab(nbytes).base


def _resident(field):
    """Bytes of this process in memory: now (VmRSS), or the most since the last reset (VmHWM)."""
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith(field))
    return int(line.split()[1]) * 1024


def _serve(pipe):
    signal.alarm(LIFE)
    commands = _Commands()
    while True:
        try:
            command, arguments, options = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            pipe.send((False, getattr(commands, command)(*arguments, **options)))
        except Exception as error:  # noqa: BLE001  the parent raises it again
            pipe.send((True, repr(error)))
