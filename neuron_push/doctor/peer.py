"""Can two engines exchange KV: which way, or why not. Nothing is written, no agent is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from neuron_push import geometry
from neuron_push.doctor.finding import Finding, error, note, ok, warning
from neuron_push.doctor.machine import Machine
from neuron_push.doctor.network import Ask, who
from neuron_push.errors import NeuronPushError
from neuron_push.plan import Means, assign, decide
from neuron_push.protocol import Address, EngineInfo
from neuron_push.sidechannel import ask

__all__ = ["compare", "direction", "peer"]

_PRODUCES: Final = {"producer", "both", "kv_producer", "kv_both"}
_CONSUMES: Final = {"consumer", "both", "kv_consumer", "kv_both"}


def peer(machine: Machine, mine: Address, theirs: Address, asking: Ask = ask) -> Iterator[Finding]:
    """Ask both engines who they are, and compare what they say."""
    there = who(theirs, asking)
    if isinstance(there, str):
        yield error(
            "peer.answers",
            there,
            "P and D greet each other over this channel before any byte moves",
            "start the peer; open its side-channel port in security groups and network policies; "
            "check that HOST:PORT is its side channel and not its HTTP port",
        )
        return
    yield ok("peer.answers", _describe(there))
    yield from _complete(there)
    yield from _reachable(machine, there)
    here = who(mine, asking)
    if isinstance(here, str):
        yield warning(
            "peer.pair",
            f"no engine here to compare with: {here}",
            "whether two engines fit depends on both",
            "start this machine's engine, or name its side channel with --engine HOST:PORT",
        )
        return
    yield note("peer.here", _describe(here))
    yield from _complete(here)
    yield from compare(here, there)


def compare(here: EngineInfo, there: EngineInfo) -> Iterator[Finding]:
    """Each direction that the two roles allow."""
    ways = [
        (prefill, decode)
        for prefill, decode in ((here, there), (there, here))
        if prefill.role in _PRODUCES and decode.role in _CONSUMES
    ]
    if not ways:
        yield error(
            "peer.roles",
            f"{here.engine} is {here.role}, {there.engine} is {there.role}",
            "one has to produce KV and the other to consume it",
            "set kv_role to kv_producer on prefill and kv_consumer on decode",
        )
    if not set(here.modes) & set(there.modes):
        yield error(
            "peer.modes",
            f"{here.engine} serves {_list(here.modes)}, {there.engine} {_list(there.modes)}",
            "both must move KV the same way",
            "run the same version of neuron-push on both",
        )
    for prefill, decode in ways:
        yield direction(prefill, decode)


def direction(prefill: EngineInfo, decode: EngineInfo) -> Finding:
    """Whether `prefill` can write what `decode` needs, rank by rank."""
    check = f"peer.pair.{prefill.engine}->{decode.engine}"
    if differences := prefill.semantics.differences(decode.semantics):
        return error(
            check,
            "; ".join(differences),
            "the same bytes would not mean the same on both sides",
            "serve the same model with the same KV dtype, RoPE and draft model on both",
        )
    try:
        ways = _ways(prefill, decode)
    except NeuronPushError as problem:
        return error(
            check,
            f"cannot exchange KV: {problem}",
            "the two arrange their pages in ways that cannot be brought together",
            "change block size, layout or parallel sizes on one side, or give staging slabs to a "
            "side that can reorder (docs/layouts.md)",
        )
    if not ways:
        return warning(
            check,
            "ranks have not announced themselves yet",
            "their memory cannot be compared",
            "wait until both engines are up, then ask again",
        )
    return ok(check, f"can talk: {'; '.join(ways)}")


def _ways(prefill: EngineInfo, decode: EngineInfo) -> list[str]:
    """One line per distinct way, with how many pairs of ranks use it."""
    ranks = sorted(prefill.ranks, key=lambda info: info.rank)
    sources = [info.geometry for info in ranks]
    counted: dict[str, int] = {}
    for each in (*sources, *(info.geometry for info in decode.ranks)):
        geometry.check(each)
    seats = sorted(decode.ranks, key=lambda info: info.rank) if sources else []
    table = assign([info.geometry for info in seats], sources)
    for info, asks in zip(seats, table, strict=True):
        for source, wanted in zip(ranks, asks, strict=True):
            if wanted is None:
                continue
            # Both sides' settings are taken for the defaults but for what they say of themselves.
            means = Means(max(0, source.slab_bytes), max(0, info.slab_bytes), decode_sole=info.sole)
            found = decide(source.geometry, info.geometry, wanted, means).describe()
            line = (
                f"{found['way']}, {found['copies_per_1000_tokens']} copies of "
                f"{found['run_bytes']} bytes per 1000 tokens"
            )
            counted[line] = counted.get(line, 0) + 1
    return [f"{count} pair(s) of ranks {line}" for line, count in counted.items()]


def _complete(info: EngineInfo) -> Iterator[Finding]:
    if len(info.ranks) < info.world:
        yield warning(
            f"peer.ranks.{info.engine}",
            f"{len(info.ranks)} of {info.world} ranks of {info.engine} have announced themselves",
            "the others are starting, or cannot reach their own engine's listener",
            "wait; then read that engine's log",
        )


def _reachable(machine: Machine, info: EngineInfo) -> Iterator[Finding]:
    failed = [
        f"rank {rank.rank} at {rank.address.host}:{rank.address.port} ({problem})"
        for rank in info.ranks
        if (problem := machine.reaches(rank.address.host, rank.address.port))
    ]
    if failed:
        yield error(
            "peer.reachable",
            f"cannot reach {'; '.join(failed[:4])}{' and more' if len(failed) > 4 else ''}",
            "each rank greets its peers at an address of its own, on any free port",
            "set the peer's VLLM_NIXL_SIDE_CHANNEL_HOST to an address that is routable from here, "
            "and open all TCP ports between the engines",
        )
    elif info.ranks:
        yield ok("peer.reachable", f"all {len(info.ranks)} announced ranks accept connections")


def _describe(info: EngineInfo) -> str:
    software = " ".join(f"{name} {version}" for name, version in info.software)
    sizes = f"TP{info.tensor_parallel} PP{info.pipeline_parallel}"
    return f"{info.engine}: {info.role}, {info.semantics.model}, {sizes} {software}".strip()


def _list(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing"
