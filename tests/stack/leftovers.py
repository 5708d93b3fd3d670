"""What is not over in a world: requests, references, transfers, agents, slabs."""

from __future__ import annotations

from collections.abc import Iterator

from tests.stack.engine import Engine


def leftovers(world) -> Iterator[tuple[object, str, object]]:
    """What is not over yet: (whose, which, what)."""
    for client in world.people:
        if not client.ended:
            yield client, "waits", ""
    for engine in world.engines.values():
        if not engine.up:
            yield engine, "is down", ""
    for engine in world.engines.values():
        yield from _left_at(engine)
    for place in world.router.fleet.engines:
        if place.in_flight or place._promised or place.moving:
            yield f"router: {place.name}", "in flight", (place.in_flight, place._promised)


def _left_at(engine: Engine) -> Iterator[tuple[object, str, object]]:
    half, used = engine.half, engine.free_at_start - engine.pool.get_num_free_blocks()
    found = {
        "blocks in use": used, "requests": engine.scheduler.requests,
        "pins": half._pins._pins, "running prefills": half._prefills.running,
        "waiting decodes": half._decodes.waiting, "steps": engine._batches,
    }  # fmt: skip
    yield from ((engine, name, what) for name, what in found.items() if what)
    for worker in engine.workers:
        core = worker.thread._core
        found = {
            "attempts": core.consumer.attempts, "sendings": core.producer.sendings,
            "sources": list(core.producer.sources), "writes": core.producer.writes,
            "reads": core.consumer.reads, "loans": core.producer.loans,
            "sessions": [link for link in core.links if link.sessions],
            "rotation": core.generations.pending,
            "generations": len(worker.thread.driver._agents._transports) - 1,
            "slabs": core._context.slabs.used,
        }  # fmt: skip
        yield from ((worker, name, what) for name, what in found.items() if what)
