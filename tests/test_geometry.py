"""A peer's geometry is believed only after every part of it was checked."""

import msgspec
import pytest

from neuron_push import geometry
from neuron_push.geometry import (
    Geometry,
    GeometryError,
    Group,
    Plane,
    Region,
    Semantics,
    axes,
    check,
)

REGION = Region(base=1 << 20, length=4096, memory="DRAM", device=0)
# (pages 4, heads 2, tokens 4, channels 8) of two bytes, dense: 512 bytes.
PLANE = Plane(
    layer=3, kind="k", region=0, offset=0, page=128, head=64, token=16, channel=2, width=8
)
GROUP = Group("full", block_tokens=8, page_tokens=4, num_blocks=2, heads=(4, 5), planes=(PLANE,))
GOOD = Geometry((REGION,), (GROUP,), element_bytes=2)


def changed(struct, **fields):
    return msgspec.structs.replace(struct, **fields)


def with_plane(group=GROUP, **fields):
    return changed(GOOD, groups=(changed(group, planes=(changed(PLANE, **fields),)),))


def with_group(**fields):
    return changed(GOOD, groups=(changed(GROUP, **fields),))


def with_region(**fields):
    return changed(GOOD, regions=(changed(REGION, **fields),))


def opaque(**fields):
    plane = {"interior": "tile", "page_bytes": 64, "token": 0, "channel": 0, **fields}
    return with_plane(**plane)


def test_a_sound_geometry_passes():
    check(GOOD)
    check(opaque())
    check(with_group(planes=(), heads=()))


def test_a_plane_may_fill_its_region_to_the_last_byte():
    check(with_region(length=512))
    with pytest.raises(GeometryError, match="ends 1 bytes beyond region 0"):
        check(with_region(length=511))


def test_an_opaque_page_of_all_heads_has_no_head_stride():
    check(opaque(head=0, page_bytes=128))
    with pytest.raises(GeometryError, match="page stride makes elements overlap"):
        check(opaque(head=0, page_bytes=130))


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (changed(GOOD, element_bytes=3), "element_bytes is 3"),
        (changed(GOOD, reserved_blocks=-1), "reserved_blocks is negative"),
        (changed(GOOD, reserved_blocks=3), "all blocks are reserved"),
        (changed(GOOD, regions=(REGION,) * 1025), "limits.regions is 1024"),
        (changed(GOOD, groups=(GROUP,) * 65), "limits.groups is 64"),
        (with_group(planes=(PLANE,) * 4097), "limits.planes is 4096"),
        (changed(GOOD, regions=(REGION, changed(REGION, memory="VRAM"))), "mix DRAM and VRAM"),
        (with_region(length=0), "must be positive"),
        (with_region(base=0), "must be positive"),
        (with_region(base=2**63 - 4096, length=4097), "beyond the address space"),
        (with_region(device=-1), "device is negative"),
        (with_group(page_tokens=0), "page_tokens out of range"),
        (with_group(page_tokens=9), "page_tokens out of range"),
        (with_group(block_tokens=1 << 25), "block_tokens out of range"),
        (with_group(page_tokens=3), "no multiple of pages of 3"),
        (with_group(num_blocks=0), "num_blocks out of range"),
        (with_group(num_blocks=2**30), "num_blocks out of range"),
        (with_group(window=-1), "window is negative"),
        (with_group(heads=()), "planes without heads"),
        (with_group(heads=(1, 1)), "a head is listed twice"),
        (with_group(heads=(-1, 1)), "a head number is negative"),
        (with_group(heads=tuple(range(1025))), "limits.heads is 1024"),
        (with_group(planes=(PLANE, PLANE)), "two planes of one layer and kind"),
        (with_group(kind="state"), "layer 3 k: does not belong in a state group"),
        (with_plane(kind="state"), "does not belong in a full group"),
        (with_plane(GROUP, layer=-1), "layer out of range"),
        (with_plane(layer=4096), "layer out of range"),
        (with_plane(region=1), "no region 1"),
        (with_plane(region=-1), "no region -1"),
        (with_plane(width=0), "width must be positive"),
        (with_plane(offset=-2), "negative"),
        (with_plane(token=-16), "negative"),
        (with_plane(offset=1), "not aligned"),
        (with_plane(page=129), "not aligned"),
        (with_plane(page=126), "page stride makes elements overlap"),
        (with_plane(page=0), "page stride makes elements overlap"),
        (with_plane(head=62), "head stride makes elements overlap"),
        (with_plane(token=14), "token stride makes elements overlap"),
        (with_plane(channel=0), "channel stride makes elements overlap"),
        (with_plane(offset=4096), "beyond region 0"),
        (with_plane(page=2**62), "beyond region 0"),
        (with_plane(interior="tile"), "page_bytes and interior"),
        (with_plane(page_bytes=64), "page_bytes and interior"),
        (opaque(interior="t" * 129), "tag is too long"),
        (opaque(token=16), "no inner strides"),
        (opaque(page_bytes=66), "head stride makes elements overlap"),
    ],
)
def test_what_contradicts_itself_is_refused_by_name(wrong, words):
    with pytest.raises(GeometryError, match=words):
        check(wrong)


def test_state_pages_are_opaque():
    group = changed(GROUP, kind="state")
    with pytest.raises(GeometryError, match="state pages are opaque"):
        check(with_plane(group, kind="state"))
    state = {"kind": "state", "interior": "mamba", "page_bytes": 64, "token": 0, "channel": 0}
    check(with_plane(group, **state))


def test_axes_name_size_and_stride():
    assert axes(PLANE, GROUP) == (
        ("page", 4, 128),
        ("head", 2, 64),
        ("token", 4, 16),
        ("channel", 8, 2),
    )


def test_geometry_survives_the_wire_in_few_bytes():
    packed = msgspec.msgpack.encode(GOOD)
    assert msgspec.msgpack.decode(packed, type=Geometry) == GOOD
    assert len(msgspec.msgpack.encode(PLANE)) < 32


def test_the_wire_refuses_unknown_kinds():
    packed = msgspec.msgpack.encode(GOOD).replace(b"DRAM", b"FILE")
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(packed, type=Geometry)


SEMANTICS = Semantics("qwen", 64, 8, 128, "bfloat16", ("full",), extra=(("rope", "1e6"),))


def test_equal_semantics_have_no_differences():
    assert SEMANTICS.differences(SEMANTICS) == []


def test_every_difference_is_a_readable_line():
    other = changed(
        SEMANTICS, head_size=64, groups=("full", "sliding"), extra=(("rope", "1e4"), ("draft", "1"))
    )
    assert SEMANTICS.differences(other) == [
        "head_size: prefill 128, decode 64",
        "groups: prefill [full], decode [full, sliding]",
        "draft: prefill unset, decode 1",
        "rope: prefill 1e6, decode 1e4",
    ]


def test_the_module_needs_no_tensor_library():
    assert not {"torch", "numpy"} & set(vars(geometry))
