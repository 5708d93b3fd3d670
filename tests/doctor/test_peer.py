"""Dry handshakes: with made-up engines, and with real listeners."""

from __future__ import annotations

import errno
import math

import msgspec
import pytest

from neuron_push.doctor import network, peer
from neuron_push.errors import TransportError
from neuron_push.geometry import Geometry, Group, Region, Semantics
from neuron_push.layouts import Place, View, interleaved, split_first
from neuron_push.protocol import Address, EngineInfo, RankInfo, Refusal
from neuron_push.sidechannel import Listener
from tests.doctor.kit import FakeMachine, found, levels

HOST = "127.0.0.1"
HERE, THERE = Address("10.0.0.1", 5600), Address("10.0.0.2", 5600)
SEMANTICS = Semantics("qwen@1", 2, 8, 128, "bfloat16", ("full",))


def trn2_rank(heads, tokens=32, blocks=8):
    """vLLM Neuron: (2, B, H, N, D)."""
    shape = (2, blocks, len(heads), tokens, 128)
    return rank_geometry(split_first, shape, heads, tokens, blocks)


def p5en_rank(heads, tokens=16, blocks=8):
    """FLASH_ATTN: (B, H, N, 2D)."""
    return rank_geometry(interleaved, (blocks, len(heads), tokens, 256), heads, tokens, blocks)


def rank_geometry(layout, shape, heads, tokens, blocks):
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    length = strides[0] * shape[0] * 2
    view = View(shape, tuple(strides), 0x10000, 2)
    planes = [p for n in range(2) for p in layout(view, Place(n, n, 0x10000))]
    regions = tuple(Region(0x10000, length, "VRAM", 0) for _ in range(2))
    group = Group("full", tokens, tokens, blocks, tuple(heads), tuple(planes))
    return Geometry(regions, (group,), 2)


def engine(name, kind, geometries, *, port=6000, world=None, slab_bytes=0, **changes):
    ranks = tuple(
        RankInfo(n, 1, Address("10.0.0.9", port + n), each, slab_bytes)
        for n, each in enumerate(geometries)
    )
    info = EngineInfo(
        name,  1, kind, world or len(ranks), len(ranks), 1, 0, ("push",), SEMANTICS, ranks,
        software=(("vllm", "0.32.0"),),
    )  # fmt: skip
    return msgspec.structs.replace(info, **changes)


def prefill(**changes):
    return engine("p", "producer", [trn2_rank([2 * n, 2 * n + 1]) for n in range(4)], **changes)


def decode(**changes):
    return engine("d", "consumer", [trn2_rank(range(8), tokens=64)], **changes)


def asking(**answers):
    """An ask that knows engines by the last number of their address."""

    def ask(address, message, timeout):
        answer = answers[f"at_{address.host.rpartition('.')[2]}"]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


def dry(tmp_path, here, there, **parts):
    return peer.peer(FakeMachine(tmp_path, {}, **parts), HERE, THERE, asking(at_1=here, at_2=there))


class TestPeer:
    def test_two_that_fit(self, tmp_path):
        seen = found(dry(tmp_path, decode(), prefill()))
        assert {check: each.level for check, each in seen.items()} == {
            "peer.answers": "ok",
            "peer.reachable": "ok",
            "peer.here": "note",
            "peer.pair.p->d": "ok",
        }
        assert seen["peer.answers"].seen == "p: producer, qwen@1, TP4 PP1 vllm 0.32.0"
        assert "4 pair(s) of ranks direct" in seen["peer.pair.p->d"].seen

    def test_one_that_does_not_answer(self, tmp_path):
        seen = found(dry(tmp_path, decode(), TransportError("no answer within 3 s")))
        assert seen["peer.answers"].level == "error"
        assert list(seen) == ["peer.answers"]

    def test_one_that_answers_otherwise(self, tmp_path):
        assert "Refusal" in found(dry(tmp_path, decode(), Refusal("no")))["peer.answers"].seen

    def test_without_an_engine_here_the_peer_is_described(self, tmp_path):
        seen = found(dry(tmp_path, TransportError("refused the connection"), prefill()))
        assert seen["peer.pair"].level == "warning"
        assert "--engine HOST:PORT" in seen["peer.pair"].remedy

    def test_ranks_behind_a_closed_port(self, tmp_path):
        finding = found(dry(tmp_path, decode(), prefill(), closed={6001, 6002}))["peer.reachable"]
        assert finding.level == "error"
        assert "rank 1 at 10.0.0.9:6001 (timed out); rank 2" in finding.seen

    def test_ranks_that_are_still_starting(self, tmp_path):
        seen = levels(dry(tmp_path, decode(), prefill(world=8)))
        assert seen["peer.ranks.p"] == "warning"


class TestCompare:
    def test_both_directions_where_both_do_both(self):
        one, two = prefill(role="both"), engine("q", "both", [trn2_rank(range(8))])
        assert levels(peer.compare(one, two)) == {
            "peer.pair.p->q": "ok",
            "peer.pair.q->p": "ok",
        }

    @pytest.mark.parametrize("role", ["producer", "consumer"])
    def test_two_of_one_role(self, role):
        one, two = prefill(role=role), decode(role=role)
        assert levels(peer.compare(one, two)) == {"peer.roles": "error"}

    def test_no_mode_in_common(self):
        assert levels(peer.compare(prefill(modes=("pull",)), decode()))["peer.modes"] == "error"

    def test_another_model(self):
        other = Semantics("qwen@2", 2, 8, 128, "float8", ("full",))
        finding = peer.direction(prefill(), decode(semantics=other))
        assert finding.level == "error"
        assert "model: prefill qwen@1, decode qwen@2" in finding.seen
        assert "dtype: prefill bfloat16, decode float8" in finding.seen

    def test_heads_that_nobody_holds(self):
        lame = engine("p", "producer", [trn2_rank([0, 1]), trn2_rank([2, 3])])
        finding = peer.direction(lame, decode())
        assert finding.level == "error"
        assert "no prefill rank holds heads 4-7" in finding.seen

    def test_ranks_that_have_not_announced_themselves(self):
        assert peer.direction(prefill(), engine("d", "consumer", [], world=1)).level == "warning"

    @pytest.mark.parametrize(
        ("one", "two", "slabs", "words"),
        [
            ("trn2", "p5en", (0, 16 << 20), "unpacked"),
            ("p5en", "trn2", (16 << 20, 0), "packed"),
            ("trn2", "trn2", (0, 0), "direct"),
            ("trn2", "p5en", (0, 0), "cannot exchange KV"),
        ],
    )
    def test_pages_of_unlike_kinds_need_a_side_that_reorders(self, one, two, slabs, words):
        kinds = {"trn2": trn2_rank, "p5en": p5en_rank}
        sides = [
            engine(name, role, [kinds[kind](range(8))], slab_bytes=slab)
            for name, role, kind, slab in zip(
                "pd", ("producer", "consumer"), (one, two), slabs, strict=True
            )
        ]
        finding = peer.direction(*sides)
        assert words in finding.seen
        if finding.level == "error":
            assert "prefill cannot pack: it does not reorder" in finding.seen
            assert "decode cannot unpack: it does not reorder" in finding.seen

    def test_a_geometry_that_contradicts_itself_is_no_crash(self):
        bad = msgspec.structs.replace(trn2_rank(range(8)), element_bytes=3)
        finding = peer.direction(prefill(), engine("d", "consumer", [bad]))
        assert finding.level == "error"
        assert "element_bytes is 3" in finding.seen

    def test_real_listeners_are_asked(self, tmp_path):
        infos = {"p": prefill(ranks=()), "d": decode(ranks=())}
        listeners = [Listener(name, HOST, 0, lambda i=i: i) for name, i in infos.items()]
        try:
            here, there = (listener.address for listener in listeners)
            seen = levels(peer.peer(FakeMachine(tmp_path, {}), here, there))
        finally:
            for listener in listeners:
                listener.close()
        assert seen["peer.answers"] == "ok"
        assert seen["peer.pair.p->d"] == "warning"  # no ranks yet


class TestHost:
    @pytest.mark.parametrize(
        ("addresses", "bound", "level"),
        [
            (["10.0.0.1"], {}, "ok"),
            (["fe80::1%eth0"], {}, "ok"),
            ([], {}, "error"),
            (["0.0.0.0"], {}, "error"),
            (["::"], {}, "error"),
            (["127.0.0.1"], {}, "warning"),
            (["10.9.9.9"], {0: errno.EADDRNOTAVAIL}, "error"),
        ],
    )
    def test_the_address_must_be_this_machines_and_reachable(
        self, tmp_path, addresses, bound, level
    ):
        here = FakeMachine(tmp_path, {}, hosts={"me": addresses}, bound=bound)
        assert levels(network.host(here, Address("me", 5600))) == {"network.host": level}


class TestPorts:
    def check(self, tmp_path, bound, ranks=1):
        def nobody(address, message, timeout):
            raise TransportError("refused")

        here = FakeMachine(tmp_path, {}, hosts={"me": ["10.0.0.1"]}, bound=bound)
        return found(network.ports(here, Address("me", 5600), ranks, nobody))

    def test_free_ones_are_fine(self, tmp_path):
        seen = self.check(tmp_path, {}, 4)
        assert seen["network.port"].seen == "port 5600 to 5603 can be used"

    def test_a_strangers_port_is_an_error(self, tmp_path):
        seen = self.check(tmp_path, {5602: errno.EADDRINUSE}, 4)
        assert (seen["network.port"].level, "5602" in seen["network.port"].seen) == ("error", True)

    def test_one_that_outgoing_connections_take_is_a_warning(self, tmp_path):
        kernel = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
        kernel.parent.mkdir(parents=True)
        kernel.write_text("5603\t60999\n")
        assert self.check(tmp_path, {}, 3)["network.port"].level == "ok"
        seen = self.check(tmp_path, {}, 5)["network.port"]
        assert seen.level == "warning" and seen.seen.startswith("port 5603, 5604 may go")

    def test_an_engine_of_ours_may_hold_it(self, tmp_path):
        here = FakeMachine(tmp_path, {}, bound={5600: errno.EADDRINUSE})
        seen = levels(network.ports(here, Address("me", 5600), 1, lambda *arguments: prefill()))
        assert seen == {"network.engine": "note", "network.port": "ok"}
