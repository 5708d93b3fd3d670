"""NxD Inference's memory: shapes as its cache managers make them, heads as its library says.

The library itself is not installable here. Its two functions about ranks are stood in for by
their documented examples (docstrings in modules/attention/utils.py and attention_process_groups.py
of neuronx-distributed-inference 4bcdc54).
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, GeometryError, Group, Region, check

torch = pytest.importorskip("torch")
nxd = pytest.importorskip("neuron_push_neuron.nxd")

B, H, S, D, LAYERS = 3, 2, 256, 8, 2


def config(**flags):
    return SimpleNamespace(**flags)


def state(key_shape, value_shape, ranks=1):
    """nxd_model.state: a dictionary per rank."""
    return [
        {
            f"kv_mgr.past_key_values.{2 * layer + which}": torch.arange(
                rank * 100_000 + 10_000 * layer + which, torch.Size(shape).numel()
                + rank * 100_000 + 10_000 * layer + which, dtype=torch.int32,
            ).reshape(shape)
            for layer in range(LAYERS)
            for which, shape in enumerate((key_shape, value_shape))
        }
        for rank in range(ranks)
    ]  # fmt: skip


def read(plane, page, head, token, channel, regions):
    """The element that a plane points at."""
    tensor = regions[plane.region]
    offset = plane.offset + page * plane.page + head * plane.head + token * plane.token
    return int(tensor.reshape(-1)[(offset + channel * plane.channel) // 4])


# What the framework itself indexes: (config, K shape, V shape, K[p, h, t, c], V[p, h, t, c]).
ARRANGEMENTS = {
    "contiguous": (
        {}, (B, H, S, D), (B, H, S, D),
        lambda k, p, h, t, c: k[p, h, t, c], lambda v, p, h, t, c: v[p, h, t, c],
    ),
    "transposed": (
        {"k_cache_transposed": True}, (B, H, D, S), (B, H, S, D),
        lambda k, p, h, t, c: k[p, h, c, t], lambda v, p, h, t, c: v[p, h, t, c],
    ),
    "tiled": (
        {"kv_cache_tiling": True}, (B, H, 128, S // 128, D), (B, H, 128, S // 128, D),
        lambda k, p, h, t, c: k.reshape(B, H, S, D)[p, h, t, c],
        lambda v, p, h, t, c: v.reshape(B, H, S, D)[p, h, t, c],
    ),
    "tiled and transposed": (
        {"kv_cache_tiling": True, "k_cache_transposed": True},
        (B, H, D, 128, S // 128), (B, H, 128, S // 128, D),
        lambda k, p, h, t, c: k.reshape(B, H, D, S)[p, h, c, t],
        lambda v, p, h, t, c: v.reshape(B, H, S, D)[p, h, t, c],
    ),
    "block": (
        {"is_block_kv_layout": True, "is_prefix_caching": True}, (B, S, H, D), (B, S, H, D),
        lambda k, p, h, t, c: k[p, t, h, c], lambda v, p, h, t, c: v[p, t, h, c],
    ),
    "tiled block": (
        {"is_prefix_caching": True}, (B, 4, S // 4, H, D), (B, 4, S // 4, H, D),
        lambda k, p, h, t, c: k.reshape(B, S, H, D)[p, t, h, c],
        lambda v, p, h, t, c: v.reshape(B, S, H, D)[p, t, h, c],
    ),
    "chunked prefill": (
        {"is_chunked_prefill": True}, (B, H, S, D), (B, H, S, D),
        lambda k, p, h, t, c: k[p, h, t, c], lambda v, p, h, t, c: v[p, h, t, c],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_planes_point_at_what_the_framework_indexes(name):
    flags, key_shape, value_shape, key_at, value_at = ARRANGEMENTS[name]
    (rank,) = nxd.caches(state(key_shape, value_shape))
    arrangement = nxd.axes(config(**flags))
    tensors = [tensor for pair in rank.values() for tensor in pair]
    regions = {tensor.untyped_storage().data_ptr(): n for n, tensor in enumerate(tensors)}
    planes = [
        plane for layer, pair in rank.items()
        for plane in nxd.planes(pair, arrangement, layer, regions)
    ]  # fmt: skip
    described = tuple(
        Region(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes(), "VRAM", 0)
        for t in tensors
    )
    group = Group("full", S, S, B, tuple(range(H)), tuple(planes))
    check(Geometry(described, (group,), 4, reserved_blocks=0))
    for plane in planes:
        pair = rank[plane.layer]
        at, tensor = (key_at, pair.key) if plane.kind == "k" else (value_at, pair.value)
        for where in [(0, 0, 0, 0), (1, 1, 129, 3), (2, 0, 255, 7), (2, 1, 128, 0)]:
            assert read(plane, *where, tensors) == int(at(tensor, *where)), (name, plane, where)


def test_flash_decoding_is_refused():
    with pytest.raises(ConfigError, match="flash decoding"):
        nxd.axes(config(flash_decoding_enabled=True))


def test_axes_that_do_not_fit_the_tensor_are_refused():
    (rank,) = nxd.caches(state((B, H, 128, 2, D), (B, H, S, D)))
    regions = {t.untyped_storage().data_ptr(): n for n, t in enumerate(rank[0])}
    with pytest.raises(GeometryError, match="do not name the axes"):
        nxd.planes(rank[0], nxd.axes(config()), 0, regions)


class TestCaches:
    def test_each_rank_and_layer_has_two(self):
        ranks = nxd.caches(state((B, H, S, D), (B, H, S, D), ranks=2))
        assert [sorted(rank) for rank in ranks] == [[0, 1], [0, 1]]
        assert int(ranks[1][1].value.flatten()[0]) == 110_001

    def test_other_state_is_left_alone(self):
        tensors = state((B, H, S, D), (B, H, S, D))
        tensors[0]["sampler.temperature"] = torch.zeros(1)
        assert sorted(nxd.caches(tensors)[0]) == [0, 1]

    @pytest.mark.parametrize("missing", ["kv_mgr.past_key_values.3", "kv_mgr.past_key_values.0"])
    def test_a_missing_half_is_refused(self, missing):
        tensors = state((B, H, S, D), (B, H, S, D))
        del tensors[0][missing]
        with pytest.raises(ConfigError, match="rank 0 holds 3 tensors"):
            nxd.caches(tensors)

    def test_no_cache_at_all_is_refused(self):
        with pytest.raises(ConfigError, match="rank 0 holds 0"):
            nxd.caches([{}])


class TestHeads:
    @pytest.mark.parametrize(
        ("kv_heads", "ranks", "held"),
        [
            (8, 4, [(0, 1), (2, 3), (4, 5), (6, 7)]),
            (4, 4, [(0,), (1,), (2,), (3,)]),
            (2, 4, [(0,), (0,), (1,), (1,)]),
            (1, 2, [(0,), (0,)]),
        ],
    )
    def test_ranks_divide_or_repeat_heads(self, kv_heads, ranks, held):
        assert nxd.held_heads(nxd.Heads(kv_heads, 32, ranks)) == held

    @pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 12), (8, 3), (3, 4)])
    def test_a_kv_head_for_each_attention_head_is_refused(self, kv_heads, ranks):
        with pytest.raises(ConfigError, match="one KV head per attention head"):
            nxd.held_heads(nxd.Heads(kv_heads, 24, ranks))

    def test_attention_data_parallelism_is_refused(self):
        with pytest.raises(ConfigError, match="data parallelism"):
            nxd.held_heads(nxd.Heads(8, 32, 8, data_ranks=2))

    @pytest.fixture
    def library(self, monkeypatch):
        """The module of that name, with these two functions."""

        def install(**functions):
            monkeypatch.setitem(sys.modules, nxd._UTILS, SimpleNamespace(**functions))
            package = nxd._UTILS
            while "." in package:
                package = package.rpartition(".")[0]
                monkeypatch.setitem(sys.modules, package, SimpleNamespace(__path__=[]))

        return install

    def test_context_parallelism_asks_the_library(self, library):
        """TP 4, 4 KV heads, CP 2: its docstring gives R0 KV0, R2 KV1, R1 KV2, R3 KV3."""
        asked = []

        def mapping(world, context, heads, cte_rank_ordering):
            asked.append((world, context, heads, cte_rank_ordering))
            return [0, 2, 1, 3]

        library(get_context_parallel_reordered_tp_mapping=mapping)
        assert nxd.held_heads(nxd.Heads(4, 32, 4, context_ranks=2)) == [(0,), (2,), (1,), (3,)]
        assert asked == [(4, 2, 4, None)]

    @pytest.mark.parametrize("switch", [False, True])
    def test_the_mesh_of_eight_by_eight_has_an_order_of_its_own(self, library, switch):
        asked = []

        def order(world, context, switch_cc):
            asked.append((world, context, switch_cc))
            return torch.arange(world).flip(0)

        def mapping(world, context, heads, cte_rank_ordering):
            asked.append(cte_rank_ordering)
            return cte_rank_ordering

        library(get_cp8_tp8_rank_ordering=order, get_context_parallel_reordered_tp_mapping=mapping)
        held = nxd.held_heads(nxd.Heads(8, 64, 64, context_ranks=8, switch=switch))
        assert asked == [(64, 8, switch), list(range(63, -1, -1))]
        assert held == [(7 - rank // 8,) for rank in range(64)]

    def test_without_the_library_nothing_is_guessed(self):
        with pytest.raises(ConfigError, match=r"neuronx-distributed-inference only.*does not"):
            nxd.held_heads(nxd.Heads(4, 32, 4, context_ranks=2))

    def test_fewer_ranks_than_heads_under_context_parallelism_are_refused(self):
        with pytest.raises(ConfigError, match="multiple of the KV heads"):
            nxd.held_heads(nxd.Heads(8, 32, 4, context_ranks=2))
