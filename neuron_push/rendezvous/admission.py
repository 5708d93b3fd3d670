"""What a prefill rank accepts of a decode rank: checked here, before anything is kept of it."""

from __future__ import annotations

from neuron_push.config import Config
from neuron_push.errors import PeerError, PlanError
from neuron_push.geometry import Geometry, check
from neuron_push.plan import (
    Ask,
    Blocks,
    Means,
    Plan,
    StagedPlan,
    Stripe,
    decide,
    decode_runs,
)
from neuron_push.protocol import MAX_BLOCKS, Hello, Register, Slabs
from neuron_push.rendezvous.links import Context, Link, owns
from neuron_push.rendezvous.producer import Sending
from neuron_push.rendezvous.routes import check_slabs

# Largest grain at which a transfer is cut: the least common multiple of all block sizes,
# unless that is absurd; then a prompt travels in one piece.
MOST_GRAIN = 1 << 14
ONE_PIECE = 1 << 40
# A day: what `Config.patience` allows.
MOST_PATIENCE = 86_400.0


def admit_hello(hello: Hello, context: Context) -> Plan | str:
    """The plan for a decode rank, or the reason why it cannot be served."""
    me = context.identity
    differences = me.semantics.differences(hello.semantics)
    if differences:
        return "the engines differ: " + "; ".join(differences)
    if not owns(hello.engine, hello.rank, hello.incarnation, hello.agent):
        return f"{hello.agent!r} is not an agent of rank {hello.rank} of {hello.engine}"
    if not context.agent:
        return "this rank is still starting"
    try:
        check(hello.geometry)
        check_slabs(hello.slabs, hello.geometry)
        ask = Ask(hello.ask, Stripe(*hello.stripe))
        return decide(me.geometry, hello.geometry, ask, _means(context, hello.slabs))
    except PlanError as error:
        return str(error)


def _means(context: Context, theirs: Slabs | None) -> Means:
    """What both sides can do; `theirs` are a decode rank's slabs."""
    ours = context.identity.slabs
    return Means(
        prefill_slab=ours.slab_bytes if ours else 0,
        decode_slab=theirs.slab_bytes if theirs else 0,
        min_run=context.config.min_run,
    )


def admit_register(link: Link, message: Register, config: Config, now: float) -> Sending:
    """The sending that a registration asks for; raises PeerError or PlanError if it is unfit."""
    blocks = _blocks(link.geometry, message)
    grain, most = _cut(link, config)
    expires = now + min(message.patience_ms / 1000, MOST_PATIENCE)
    return Sending(link, message, blocks, grain, most, now, expires)


def _blocks(geometry: Geometry, message: Register) -> tuple[Blocks, ...]:
    """The blocks that a registration lists, group by group."""
    groups = geometry.groups
    if len(message.blocks) != len(groups):
        raise PeerError(f"{len(message.blocks)} block lists for {len(groups)} KV groups")
    blocks = []
    for group, entry in zip(groups, message.blocks, strict=True):
        ids = decode_runs(entry.runs, MAX_BLOCKS)
        if entry.first < 0 or (ids.size and int(ids.max()) >= group.num_blocks):
            raise PeerError("a block id or index lies outside the registered pages")
        low, high = entry.first, entry.first + ids.size
        if message.start < message.stop and group.kind in ("full", "mla") and not (
            low * group.block_tokens <= message.start
            and message.stop <= high * group.block_tokens
        ):  # fmt: skip
            raise PeerError(
                f"blocks {low}..{high} of {group.block_tokens} tokens do not hold tokens "
                f"{message.start}..{message.stop}"
            )
        blocks.append(Blocks(entry.first, ids))
    return tuple(blocks)


def _cut(link: Link, config: Config) -> tuple[int, int]:
    """(grain, tokens per WRITE) of transfers towards a link."""
    plan = link.plan
    assert plan is not None
    span = plan.stripe.span
    if isinstance(plan, StagedPlan):
        return plan.grain, span(plan.tokens)
    if plan.grain > MOST_GRAIN:
        return ONE_PIECE, ONE_PIECE
    token = _bytes_per_token(link.geometry)
    most = span(config.slice_bytes // max(1, token))
    return plan.grain, max(plan.grain, most // plan.grain * plan.grain)


def _bytes_per_token(geometry: Geometry) -> int:
    """Bytes that one token takes on one rank, over all groups and layers."""
    total = 0
    for group in geometry.groups:
        for plane in group.planes:
            if plane.page_bytes:
                total += plane.page_bytes // group.page_tokens
            else:
                total += plane.width * geometry.element_bytes * max(1, len(group.heads))
    return total
