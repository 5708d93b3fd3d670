"""One rank: the real worker half, and the real transfer thread, stepped by hand."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from unittest import mock

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput

import neuron_push.transfer.sidechannel as sidechannel_module
import neuron_push.vllm.station as station_module
from neuron_push.rendezvous.attempt import attempt_of
from neuron_push.transfer import TransferThread
from neuron_push.vllm.connector import NeuronPushConnector
from tests.stack.device import HEADS, Memory, PlayedAccelerator
from tests.stack.wire import MemoryClient, RankServer
from tests.vllm.kit import LAYERS

# How soon the thread looks again (transfer/pause.py), by what it expects; and how much less often
# where it finds nothing, which decides nothing: what happens to its agents ends the rest.
PAUSES = {"busy": 0.0003, "announced": 0.001, "waiting": 0.004, "idle": 0.03, "empty": 0.05}
SLOWER, LONGEST = 1.5, 4


class SteppedThread(TransferThread):
    """The transfer thread, without a thread: the world says when it takes its turn."""

    def __init__(self, *given, worker, **named) -> None:
        super().__init__(*given, clock=worker.world.clock, **named)
        self._worker = worker

    def start(self, timeout=0.0):
        self.driver = self._make_driver()
        self._begin(self.driver)
        return self.driver.side.server.address

    def submit(self, commands, fence=None, *, wake=True):
        super().submit(commands, fence, wake=wake)
        if wake:
            self._worker.nudge()

    def wait(self, timeout):
        return super().wait(0.0)

    def turn(self) -> bool:
        return self._turn(self.driver)

    def _tell(self, report):
        super()._tell(report)
        self._worker.engine.news()

    def rest(self) -> float:
        """Seconds until the next look."""
        return PAUSES["busy" if self._fenced else self._core.tempo]


class Worker:
    """A worker process of an engine."""

    def __init__(self, engine, rank, config, kv) -> None:
        self.engine, self.rank, self.world = engine, rank, engine.world
        shape, fabric = engine.shape, self.world.fabric
        each = HEADS // shape.ranks
        heads = slice(rank * each, (rank + 1) * each)
        self.memory = Memory(fabric, shape.blocks, shape.block, heads, shape.order)
        self.accelerator = PlayedAccelerator(fabric, engine.stream)
        self._rounds = 0  # without work
        self._serial = 0  # of the turn that is to come
        self.connector = NeuronPushConnector(config, KVConnectorRole.WORKER, kv)
        self.half = self.connector._in_worker
        self.half._accelerator = self.accelerator
        with (
            mock.patch.object(station_module, "get_tensor_model_parallel_rank", lambda: rank),
            mock.patch.object(
                station_module, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0)
            ),
            mock.patch.object(
                station_module, "TransferThread", partial(SteppedThread, worker=self)
            ),
            mock.patch.object(station_module, "_transport", lambda *_: fabric.open_for(self)),
            mock.patch.object(sidechannel_module, "Server", self._server),
            mock.patch.object(sidechannel_module, "Client", self._client),
        ):
            self.connector.register_kv_caches(self.memory.tensors())
        self.thread = self.half._thread
        self.nudge()

    def __str__(self) -> str:
        return f"{self.engine}/{self.rank}"

    def _server(self, host, port, ring, limits):
        return RankServer(self.world.wire, host, self.engine.when_awake, self._asked)

    def _client(self, ring, limits):
        return MemoryClient(self.world.wire, self.nudge)

    def _asked(self) -> None:
        self.thread.driver.side.asked = True
        self.nudge()

    def blocks_at(self, addresses) -> list[tuple[object, int, int]]:
        """(engine, block, hand-outs so far) of everything at these addresses but slabs."""
        found = {self.memory.block_at(address) for address in addresses} - {None}
        return [(self.engine, block, self.engine.epochs[block]) for block in sorted(found)]

    def attempt_of_read(self, read) -> int:
        """The attempt that a READ of this rank's belongs to."""
        number, _ = self.thread._core.consumer.reads.find(read) or (0, None)
        return number

    def lends(self, reader, attempt: int) -> bool:
        """Whether this rank lends blocks to another one for an attempt of its."""
        who = reader.thread._core._context.identity
        return any(
            sending.lender is not None
            and attempt_of(sending.register.attempt) == attempt
            and (sending.link.engine, sending.link.rank, sending.link.incarnation)
            == (who.engine, who.rank, who.incarnation)
            for sending in self.thread._core.producer.sendings.values()
        )

    # ------------------------------------------------------------------ hooks, in a runner's order

    def begin(self, meta) -> None:
        self.connector.handle_preemptions(meta)
        self.connector.bind_connector_metadata(meta)
        self.connector.start_load_kv(None)

    def layer(self, number: int) -> None:
        self.connector.save_kv_layer(LAYERS[number], None, None)

    def end(self, output, *, forward: bool):
        if forward or not self.engine.shape.late_hooks:
            self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        told = KVConnectorOutput(
            finished_sending=results.finished_sending, finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_stats=self.connector.get_kv_connector_stats(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )  # fmt: skip
        self.connector.clear_connector_metadata()
        return None if told.is_empty() else told

    # ------------------------------------------------------------------ the thread

    def nudge(self) -> None:
        """The thread is woken, or will look again before it rests."""
        self._schedule(self.world.clock.wait(0.00005))

    def stirred(self) -> None:
        """Something happened to an agent of its, which a thread that looks often sees soon."""
        if self._rounds > 1 and self.engine.up:
            self._rounds = 0
            self._schedule(self.world.clock.rng.uniform(0, PAUSES["busy"]))

    def _schedule(self, delay: float) -> None:
        self._serial += 1
        serial = self._serial
        self.world.clock.at(delay, "transfer", lambda: self._come(serial))

    def _come(self, serial: int) -> bool:
        if serial != self._serial or not self.engine.up:
            return False
        if self.engine.frozen_until > self.world.clock.now:
            self.engine.when_awake(self.nudge)
            return False
        return self._turn()

    def _turn(self) -> bool:
        worked = self.thread.turn()
        self._rounds = 0 if worked else self._rounds + 1
        slower = min(SLOWER ** (self._rounds - 1), LONGEST)
        rest = 0.0001 if worked else self.thread.rest() * slower
        self._schedule(rest * self.world.clock.rng.uniform(0.7, 1.3))
        return worked

    def crash(self) -> None:
        """The process dies: what it had posted may still land elsewhere, nothing lands here."""
        for transport in self.thread.driver._agents._transports.values():
            self.world.fabric.kill(transport.name)
        self.thread.driver.side.server.close()
        self.thread.driver.side.client.close()
        self.thread._pause.close()
        self.world.fabric.forget([*self.memory.stores, *self.accelerator.slabs])
