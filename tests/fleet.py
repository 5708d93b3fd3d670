"""Glue of the plan tests: engines made of oracle caches, and their geometries."""

from dataclasses import dataclass

import numpy as np

from neuron_push import layouts
from neuron_push.geometry import Geometry, Group, Region
from neuron_push.hostmover import HostMover
from neuron_push.plan import Ask, Blocks, assign, bind, pair
from tests import oracle

ELEMENT = 4


def region_of(store):
    return Region(store.data_ptr(), store.numel() * store.element_size(), "DRAM", 0)


def planes_of(cache, first_region=0):
    """What the accelerator plug-in of each framework would say about its tensors."""
    planes = []
    for layer in cache.layers:
        if isinstance(cache.tensors[layer], tuple):
            planes += planes_apart(cache, layer, first_region)
            continue
        store = cache.store_of(layer)
        where = layouts.Place(layer, first_region + store, cache.stores[store].data_ptr())
        view = layouts.View.of(cache.tensors[layer])
        match cache.layout:
            case "neuron":
                planes += layouts.split_first(view, where)
            case "nhd" | "old_hnd":
                planes += layouts.split_first(view, where, axes="NHD")
            case "block_first":
                planes += layouts.block_first(view, where)
            case "vec":
                planes += layouts.cpu_attn_vec(view, where)
            case "amx":
                planes += layouts.cpu_attn_opaque(view, where, isa="amx")
            case "mla":
                planes += layouts.mla(view, where)
            case _:
                planes += layouts.interleaved(view, where)
    return tuple(planes)


AXES = {
    "contiguous": ("BHND", "BHND"),
    "transposed": ("BHDN", "BHND"),
    "tiled": ("BHDNN", "BHNND"),
    "block": ("BNHD", "BNHD"),
    "tiled_block": ("BNNHD", "BNNHD"),
    "fp8": ("", "BHND"),
}


def planes_apart(cache, layer, first_region):
    """K and V in tensors of their own."""
    for kind, tensor, axes in zip("kv", cache.tensors[layer], AXES[cache.layout], strict=True):
        base = tensor.untyped_storage().data_ptr()
        region = next(i for i, store in enumerate(cache.stores) if store.data_ptr() == base)
        where = layouts.Place(layer, first_region + region, base)
        view = layouts.View.of(tensor)
        if axes:
            yield layouts.single(view, where, kind, axes)
        else:
            yield layouts.fp8_packed_key(view, where)


def group_of(cache, block_tokens, kind="full", first_region=0, window=0):
    per_block = block_tokens // cache.tokens
    kind = "mla" if cache.layout == "mla" else kind
    planes = planes_of(cache, first_region)
    return Group(
        kind, block_tokens, cache.tokens, cache.pages // per_block, cache.heads, planes, window
    )


def geometry_of(cache, block_tokens, kind="full"):
    regions = tuple(map(region_of, cache.stores))
    return Geometry(regions, (group_of(cache, block_tokens, kind),), ELEMENT)


def with_states(geometry, states, heads=(0,)):
    """One more group, of a state per request: oracle.States."""
    first = len(geometry.regions)
    planes = tuple(
        layouts.state(
            [layouts.View.of(tensor) for tensor in both],
            layouts.Place(layer, first + index, states.stores[index].data_ptr()),
        )
        for index, (layer, both) in enumerate(states.tensors.items())
    )
    group = Group("state", 4096, 4096, len(states.stores[0]), heads, planes)
    regions = (*geometry.regions, *map(region_of, states.stores))
    return Geometry(regions, (*geometry.groups, group), geometry.element_bytes)


@dataclass
class Engine:
    """Ranks of one engine; every rank uses the same block list."""

    caches: list
    block_tokens: int
    blocks: list
    first: int = 0
    kind: str = "full"

    @property
    def geometries(self):
        return [geometry_of(cache, self.block_tokens, self.kind) for cache in self.caches]

    @property
    def lists(self):
        return [Blocks(self.first, np.array(self.blocks, np.int32))]


def heads_of(rank, degree, heads):
    """KV heads of one tensor-parallel rank; ranks beyond the heads hold replicas."""
    if degree >= heads:
        return [rank * heads // degree]
    share = heads // degree
    return list(range(rank * share, (rank + 1) * share))


def engine(
    layout,
    *,
    tokens,
    per_block=1,
    blocks,
    spare=0,
    degree=1,
    stages=1,
    layers=2,
    heads=2,
    width=3,
    kind="full",
    first=0,
):
    """An engine whose pool has room for `blocks` and `spare` more."""
    if layout == "mla":
        heads = 1
    pages = (max(blocks, default=0) + 1 + spare) * per_block
    caches = [
        oracle.Cache(
            layout,
            range(stage * layers // stages, (stage + 1) * layers // stages),
            heads_of(rank, degree, heads),
            pages,
            tokens,
            width,
        )
        for stage in range(stages)
        for rank in range(degree)
    ]
    return Engine(caches, tokens * per_block, list(blocks), first, kind)


def rows(copies):
    return rows_of(copies)


def rows_of(copies):
    return np.column_stack(
        (
            copies.source_region,
            copies.source_offset,
            copies.destination_region,
            copies.destination_offset,
            copies.length,
        )
    ).tolist()


def push(prefill, decode, start, stop, *, min_run=1, spoil=lambda geometry: geometry):
    """Plan and replay all pairs; returns the copies of each. `spoil` may falsify decode."""
    done = []
    sources, destinations = prefill.geometries, [spoil(true) for true in decode.geometries]
    for seat, asks in enumerate(assign(destinations, sources)):
        cache, destination = decode.caches[seat], destinations[seat]
        written = [np.zeros(len(memory), np.uint8) for memory in cache.memory()]
        for rank, ask in enumerate(asks):
            if ask is None:
                continue
            plan = pair(sources[rank], destination, ask, min_run=min_run)
            copies = plan.copies(start, stop, prefill.lists, decode.lists)
            check_binding(copies, sources[rank], destination)
            oracle.replay(prefill.caches[rank].memory(), cache.memory(), rows_of(copies), written)
            done.append(copies)
        assert max((int(count.max()) for count in written if len(count)), default=0) <= 1
    return done


def cut(start, stop, plan):
    """Pieces as the sender cuts them: at the grain, each within one slab."""
    most = plan.stripe.span(plan.tokens)
    while start < stop:
        end = (start + most) // plan.grain * plan.grain
        end = min(end, stop)
        assert end > start
        yield start, end
        start = end


class Slab:
    """Staging memory full of noise, between two stretches that nothing may touch."""

    GUARD = 64

    def __init__(self, nbytes):
        rng = np.random.default_rng(3)
        self.array = rng.integers(0, 256, nbytes + 2 * self.GUARD, dtype=np.uint8)
        self.before = self.array.copy()
        self.memory = self.array[self.GUARD : self.GUARD + nbytes]
        self.address = self.memory.ctypes.data

    def check(self):
        for guard in (slice(0, self.GUARD), slice(-self.GUARD, None)):
            assert (self.array[guard] == self.before[guard]).all()


def carry(plan, prefill, decode, ranks, piece, lists, written):
    """One piece of a staged pair: pack and WRITE, or WRITE and unpack. Returns copies and rows."""
    sources, targets = prefill.caches[ranks[0]].memory(), decode.caches[ranks[1]].memory()
    slabs = [Slab(plan.slab_bytes) for _ in "pd"]
    regions = [Region(slab.address, plan.slab_bytes, "DRAM", 0) for slab in slabs]
    copies, moves = plan.copies(*piece, *lists), []
    if plan.packs:
        moves += rearrange(plan.rows(*piece, *lists, slabs[0].address, pack=True))
        sources = [*sources, slabs[0].memory]
    check_binding(copies, *plan.ends(*regions))
    if plan.unpacks:
        filled = [np.zeros(len(memory), np.uint8) for memory in (*targets, slabs[1].memory)]
        oracle.replay(sources, [*targets, slabs[1].memory], rows_of(copies), filled)
        assert max(int(count.max(initial=0)) for count in filled) <= 1
        # As decode does, which does not know which blocks prefill holds.
        rows = rearrange(plan.unpack_rows(*piece, lists[1], slabs[1].address))
        for part in rows:
            tally(part.destination, part.unit, plan.destination, written)
        moves += rows
    else:
        oracle.replay(sources, targets, rows_of(copies), written)
    for slab in slabs:
        slab.check()
    return copies, moves


def rearrange(rows):
    """Carry rows out; returns them."""
    for part in rows:
        check_grids(part)
    HostMover().move(rows)
    return rows


def check_grids(rows):
    """Both forms of rows name the same places."""
    if not rows.grids:
        return
    found = []
    for grid in rows.grids:
        assert grid.unit == rows.unit
        places = np.array([[grid.source, grid.destination]])
        for size, *steps in grid.axes:
            places = (places[:, None] + np.arange(size)[:, None] * np.array(steps)).reshape(-1, 2)
        found += places.tolist()
    sides = [
        side if isinstance(side, np.ndarray) else side + rows.unit * np.arange(rows.count)
        for side in (rows.source, rows.destination)
    ]
    assert sorted(found) == sorted(np.column_stack(sides).tolist())


def tally(addresses, unit, geometry, written):
    """Count the bytes that rows write."""
    for address in np.asarray(addresses).tolist():
        for region, count in zip(geometry.regions, written, strict=True):
            if region.base <= address < region.base + region.length:
                at = address - region.base
                assert at + unit <= region.length
                count[at : at + unit] += 1
                break
        else:
            raise AssertionError("a row lies in no region")


def push_by(prefill, decode, start, stop, choose, *, spoil=None):
    """Choose, plan and carry out all pairs; returns [(plan, [(copies, rows) per piece])]."""
    done = []
    spoil = spoil or (lambda which, true: true)
    sources = [spoil("prefill", true) for true in prefill.geometries]
    destinations = [spoil("decode", true) for true in decode.geometries]
    for seat, asks in enumerate(assign(destinations, sources)):
        cache, destination = decode.caches[seat], destinations[seat]
        written = [np.zeros(len(memory), np.uint8) for memory in cache.memory()]
        for rank, ask in enumerate(asks):
            if ask is None:
                continue
            plan = choose(sources[rank], destination, ask)
            lists = prefill.lists, decode.lists
            if plan.way == "direct":
                copies = plan.copies(start, stop, *lists)
                oracle.replay(
                    prefill.caches[rank].memory(), cache.memory(), rows_of(copies), written
                )
                done.append((plan, [(copies, [])]))
                continue
            pieces = []
            for piece in cut(start, stop, plan):
                chosen = plan.plan_of(*piece, *lists)
                if chosen.way == "direct":
                    copies = chosen.copies(*piece, *lists)
                    memory = prefill.caches[rank].memory(), cache.memory()
                    oracle.replay(*memory, rows_of(copies), written)
                    pieces.append((copies, []))
                else:
                    seats = rank, seat
                    pieces.append(carry(chosen, prefill, decode, seats, piece, lists, written))
            done.append((plan, pieces))
        assert max((int(count.max()) for count in written if len(count)), default=0) <= 1
    return done


def check_binding(copies, source, destination):
    """The addresses are the offsets from each region's base, in the same order."""
    read, written = bind(copies, source, destination)
    bases = np.array([region.base for region in source.regions], np.int64)
    assert (read[:, 0].astype(np.int64) == bases[copies.source_region] + copies.source_offset).all()
    bases = np.array([region.base for region in destination.regions], np.int64)
    addresses = bases[copies.destination_region] + copies.destination_offset
    assert (written[:, 0].astype(np.int64) == addresses).all()
    assert (read[:, 1] == written[:, 1]).all() and (read[:, 1] == copies.length).all()
    assert copies.nbytes == int(copies.length.sum()) and copies.count == len(copies.length)


def everything(geometry):
    return Ask(tuple(group.heads for group in geometry.groups))


def one_pair(prefill, decode, *, min_run=1):
    """The plan between the first ranks for all heads of decode."""
    source, destination = prefill.geometries[0], decode.geometries[0]
    return pair(source, destination, everything(destination), min_run=min_run)
