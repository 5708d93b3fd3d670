"""What a prefill rank accepts of a decode rank: checked here, before anything is kept of it."""

from __future__ import annotations

from collections.abc import Iterable

from neuron_push.errors import PeerError, PlanError
from neuron_push.geometry import check
from neuron_push.plan import Ask, Blocks, Means, Plan, StagedPlan, Stripe, decide
from neuron_push.protocol import Hello, Register, Slabs
from neuron_push.rendezvous.blocklists import decode_blocks
from neuron_push.rendezvous.cuts import cut_of
from neuron_push.rendezvous.links import Context, Link, owns
from neuron_push.rendezvous.producer import Sending
from neuron_push.rendezvous.routes import check_slabs

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
        limits = context.config.limits
        check(hello.geometry, limits)
        check_slabs(hello.slabs, hello.geometry, limits)
        ask = Ask(hello.ask, Stripe(*hello.stripe))
        plan = decide(me.geometry, hello.geometry, ask, _means(context, hello.slabs))
    except PlanError as error:
        return str(error)
    return _for_layers(plan) if context.config.streaming == "layer" else plan


def _for_layers(plan: Plan) -> Plan:
    """Straight, if that is from page to page: what hides layers under compute needs no slab."""
    straight = plan.straight if isinstance(plan, StagedPlan) else None
    if straight is None or straight.plan.way != "direct" or straight.too_many:
        return plan
    return straight.plan


def crowded(links: Iterable[Link], context: Context) -> str:
    """Why no further decode rank can be linked, or nothing."""
    most = context.config.limits.links
    linked = sum(link.peer == "decode" for link in links)
    return f"{linked} decode ranks are linked; limits.links is {most}" if linked >= most else ""


def _means(context: Context, theirs: Slabs | None) -> Means:
    """What both sides can do; `theirs` are a decode rank's slabs."""
    ours = context.identity.slabs
    return Means(
        prefill_slab=ours.slab_bytes if ours else 0,
        decode_slab=theirs.slab_bytes if theirs else 0,
        min_run=context.config.min_run,
        decode_sole=theirs is not None and theirs.sole,
        both=ours is not None and theirs is not None and min(ours.count, theirs.count) > 1,
    )


def admit_register(link: Link, message: Register, context: Context, now: float) -> Sending:
    """The sending that a registration asks for; raises PeerError or PlanError if it is unfit."""
    config, plan = context.config, link.plan
    limits = config.limits
    assert plan is not None
    if link.sessions >= limits.registrations:
        raise PeerError(
            f"{link.sessions} transfers of this decode rank are waiting or under way; "
            f"limits.registrations is {limits.registrations}"
        )
    if message.pull and config.mode == "push":
        raise PeerError('this prefill engine is set to "mode": "push" and lends no blocks')
    blocks: tuple[Blocks, ...] = ()
    if message.pull and config.host_staging:
        raise PeerError("this prefill engine has host_staging on: push, its pages cannot be READ")
    if message.blocks or not message.pull:
        span = message.start, message.stop
        blocks = decode_blocks(link.geometry, message.blocks, *span, limits.blocks)
    listed = link.listed + sum(each.ids.size for each in blocks)
    if listed > limits.blocks_in_all:
        raise PeerError(
            f"registrations of this decode rank would list {listed} blocks; "
            f"limits.blocks_in_all is {limits.blocks_in_all}"
        )
    straight = plan.straight.plan if isinstance(plan, StagedPlan) and plan.straight else plan
    cut, slab_cut = (
        cut_of(each, link.geometry, config.slice_bytes, config.batch_tokens)
        for each in (straight, plan)
    )
    expires = now + min(message.patience_ms / 1000, MOST_PATIENCE)
    return Sending(link, message, blocks, cut, slab_cut, now, expires)
