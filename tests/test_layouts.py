"""Builders are compared with the addresses of single elements of real tensors."""

import importlib.util
from functools import partial
from pathlib import Path

import pytest
import torch

from neuron_push.geometry import GeometryError, check
from neuron_push.layouts import (
    Place,
    View,
    block_first,
    cpu_attn_opaque,
    cpu_attn_vec,
    fp8_packed_key,
    interleaved,
    mla,
    single,
    split_first,
    state,
)
from tests import fleet, oracle

LAYOUTS = (
    "interleaved",
    "token_major",
    "blocks_outermost",
    "heads_outermost",
    "neuron",
    "nhd",
    "old_hnd",
    "vec",
    "mla",
    "block_first",
    "contiguous",
    "transposed",
    "tiled",
    "block",
    "tiled_block",
)


def elements(cache, plane):
    """Every element of a plane by its address formula, as (pages, heads, tokens, channels)."""
    store = cache.stores[plane.region].reshape(-1)
    size = (cache.pages, len(cache.heads), cache.tokens, cache.width)
    page, head, token, channel = torch.meshgrid(*map(torch.arange, size), indexing="ij")
    address = (
        plane.offset
        + page * plane.page
        + head * plane.head
        + token * plane.token
        + channel * plane.channel
    )
    return store[address // store.element_size()].numpy()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_address_formula_finds_every_element(layout):
    heads = (0,) if layout == "mla" else (0, 1, 2)
    cache = oracle.Cache(layout, (0, 5), heads, pages=4, tokens=6, width=5)
    oracle.fill(cache, [2, 1, 3], 6, 0, 18)
    check(fleet.geometry_of(cache, 6))
    for plane in fleet.planes_of(cache):
        assert (elements(cache, plane) == cache.read(plane.layer, plane.kind)).all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_tensor_inside_a_larger_region_is_found_by_its_address(layout):
    heads = (0,) if layout == "mla" else (0, 1)
    cache = oracle.Cache(layout, (0,), heads, pages=2, tokens=4, width=3)
    (plane, *_) = fleet.planes_of(cache)
    first = cache.tensors[0]
    view = View.of(first[0] if isinstance(first, tuple) else first)
    assert plane.offset == view.address - cache.stores[0].data_ptr()


def test_packed_tiles_are_opaque_spans_of_one_head():
    tensor = torch.zeros(4, 2, 32, 2 * 8, dtype=torch.bfloat16)
    key, value = cpu_attn_opaque(View.of(tensor), Place(1, 0, tensor.data_ptr()), isa="amx")
    assert (key.page, key.head, key.page_bytes, key.offset) == (2048, 1024, 512, 0)
    assert (value.page, value.head, value.page_bytes, value.offset) == (2048, 1024, 512, 512)
    assert key.interior == "cpu_attn:amx:k:32x8x2" and value.interior == "cpu_attn:amx:v:32x8x2"


def test_raw_bytes_are_read_as_wider_elements():
    raw = torch.zeros(3, 2, 4, 32, dtype=torch.int8)
    typed = raw.view(torch.bfloat16)
    assert View.of(raw, element=2) == View.of(typed)
    with pytest.raises(GeometryError, match="no whole 2-byte elements"):
        View.of(torch.zeros(3, 2, 4, 31, dtype=torch.int8), element=2)
    with pytest.raises(GeometryError, match="no whole 2-byte elements"):
        View.of(raw.transpose(2, 3), element=2)


def test_keys_may_be_wider_than_values():
    tensor = torch.zeros(2, 1, 4, 24 + 16)
    key, value = interleaved(View.of(tensor), Place(0, 0, tensor.data_ptr()), key_width=24)
    assert (key.width, value.width, value.offset) == (24, 16, 24 * 4)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (interleaved, (3, 2, 4, 8)),
        (split_first, (2, 3, 2, 4, 8)),
        (block_first, (3, 2, 2, 4, 8)),
        (cpu_attn_vec, (3, 2, 4, 8)),
        (partial(cpu_attn_opaque, isa="amx"), (3, 2, 4, 8)),
        (mla, (3, 4, 8)),
        (lambda view, place: [single(view, place, "k", "BHND")], (3, 2, 4, 8)),
        (lambda view, place: [fp8_packed_key(view, place)], (3, 2, 4, 8, 2)),
        (lambda view, place: [state([view], place)], (3, 64)),
    ],
)
def test_planes_begin_where_the_tensor_lies_in_its_allocation(build, shape):
    count = torch.Size(shape).numel()
    store = torch.arange(1000 + count, dtype=torch.int32)
    view = View.of(store[1000:].view(shape))
    first, *others = build(view, Place(0, 0, store.data_ptr()))
    assert first.offset == 4000
    last = max([first, *others], key=lambda plane: plane.offset)
    assert 4000 <= last.offset < 4000 + 4 * count


def test_latent_caches_may_carry_a_head_axis_of_one():
    flat = torch.zeros(5, 4, 24)
    place = Place(0, 0, flat.data_ptr())
    assert mla(View.of(flat[:, None]), place) == mla(View.of(flat), place)


@pytest.mark.parametrize(
    ("build", "shape", "words"),
    [
        (interleaved, (2, 3, 4), "expected 4 axes"),
        (interleaved, (2, 3, 4, 5), "5 channels do not split"),
        (split_first, (3, 2, 2, 2, 2), "first axis must hold K and V"),
        (split_first, (2, 2, 2, 2), "expected 5 axes"),
        (block_first, (3, 3, 2, 2, 2), "second axis must hold K and V"),
        (fp8_packed_key, (2, 1, 4, 3, 3), "shape .B, H, N/2, D, 2."),
        (mla, (2, 2, 3, 4), "expected 3 axes"),
        (cpu_attn_vec, (2, 2, 3, 5), "CPU_ATTN needs contiguous"),
    ],
)
def test_a_tensor_of_another_shape_is_refused(build, shape, words):
    tensor = torch.zeros(shape)
    with pytest.raises(GeometryError, match=words):
        build(View.of(tensor), Place(0, 0, tensor.data_ptr()))


@pytest.mark.parametrize("axes", ["BHN", "BHNN", "BHNDD", "BHXD", ""])
def test_axes_that_do_not_name_the_tensor_are_refused(axes):
    tensor = torch.zeros(2, 3, 4, 5)
    with pytest.raises(GeometryError, match="axes"):
        single(View.of(tensor), Place(0, 0, tensor.data_ptr()), "k", axes)


def test_tiles_that_do_not_follow_each_other_are_refused():
    tensor = torch.zeros(2, 3, 4, 6, 5).transpose(2, 3)
    with pytest.raises(GeometryError, match="tiles of tokens"):
        single(View.of(tensor), Place(0, 0, tensor.data_ptr()), "v", "BHNND")


def test_packed_fp8_keys_are_one_span_per_head():
    tensor = torch.zeros(4, 2, 16, 8, 2, dtype=torch.uint8)
    key = fp8_packed_key(View.of(tensor), Place(3, 1, tensor.data_ptr()))
    assert (key.page, key.head, key.page_bytes) == (512, 256, 256)
    assert key.interior == "neuron:fp8_packed:k:32x8x1"
    gap = torch.zeros(4, 2, 16, 8, 4, dtype=torch.uint8)[..., :2]
    with pytest.raises(GeometryError, match="contiguous per head"):
        fp8_packed_key(View.of(gap), Place(0, 0, gap.data_ptr()))


def mamba(pages=4, raw=64):
    """A conv state of 4x3 bf16 and an SSM state of 2x4 floats in one raw page, as vLLM cuts it."""
    store = torch.zeros(pages, raw, dtype=torch.int8)
    conv = store.view(torch.bfloat16).as_strided((pages, 4, 3), (raw // 2, 3, 1), 0)
    ssm = store.view(torch.float32).as_strided((pages, 2, 4), (raw // 4, 4, 1), 24 // 4)
    return store, conv, ssm


def test_a_state_page_spans_all_its_tensors():
    store, conv, ssm = mamba()
    plane = state([View.of(conv), View.of(ssm)], Place(7, 0, store.data_ptr()))
    assert (plane.offset, plane.page, plane.head, plane.page_bytes) == (0, 64, 0, 24 + 32)
    assert plane.interior == "mamba:4x3x2+2x4x4" and plane.kind == "state"
    conv[2], ssm[2] = 1, 2
    copied = torch.zeros_like(store)
    span = slice(2 * plane.page, 2 * plane.page + plane.page_bytes)
    copied.view(-1)[span] = store.view(-1)[span]
    assert torch.equal(copied, store)


def test_tensors_of_different_state_pages_are_refused():
    _, conv, ssm = mamba()
    place = Place(0, 0, min(conv.data_ptr(), ssm.data_ptr()))
    with pytest.raises(GeometryError, match="do not lie in the same page"):
        state([View.of(conv[:1]), View.of(ssm[1:])], place)
    with pytest.raises(GeometryError, match="pages of different sizes"):
        state([View.of(conv), View.of(mamba(raw=128)[2])], place)
    with pytest.raises(GeometryError, match="without tensors"):
        state([], place)


def test_the_cpu_kernel_needs_a_dense_interior():
    tensor = torch.zeros(2, 4, 3, 6).transpose(1, 2)
    with pytest.raises(GeometryError, match="CPU_ATTN needs contiguous"):
        cpu_attn_vec(View.of(tensor), Place(0, 0, tensor.data_ptr()))


@pytest.fixture(scope="module")
def cpu_kernel():
    """vLLM's own cache writer, loaded without importing vllm (which takes many seconds)."""
    spec = importlib.util.find_spec("vllm")
    if spec is None:
        pytest.skip("vllm is not installed")
    libraries = [Path(folder, "_C.abi3.so") for folder in spec.submodule_search_locations]
    try:
        torch.ops.load_library(str(libraries[0]))
        return torch.ops._C.cpu_attn_reshape_and_cache
    except (OSError, AttributeError) as error:
        pytest.skip(f"no CPU build of vllm: {error}")


def kernel_write(kernel, isa, tensor, token, seed):
    """Twenty random tokens from slot `token` of page 3, as CPU_ATTN of vLLM 0.32 writes them."""
    pages, heads, tokens, both = tensor.shape
    halves = tensor.view(pages, heads, 2 * tokens, both // 2).chunk(2, dim=2)
    generator = torch.Generator().manual_seed(seed)
    key, value = (
        torch.randn(20, heads, both // 2, generator=generator).to(tensor.dtype) for _ in "kv"
    )
    slots = torch.arange(3 * tokens + token, 3 * tokens + token + 20)
    kernel(key, value, *halves, slots, isa, 1.0, 1.0, "auto")
    return key, value


@pytest.mark.parametrize("isa", ["vec", "vec16"])
@pytest.mark.parametrize("tokens", [32, 64, 128])
def test_the_kernel_of_vllm_stores_k_transposed(cpu_kernel, isa, tokens):
    tensor = torch.zeros(6, 2, tokens, 2 * 64, dtype=torch.bfloat16)
    written = kernel_write(cpu_kernel, isa, tensor, 5, seed=1)
    planes = cpu_attn_vec(View.of(tensor), Place(0, 0, tensor.data_ptr()))
    for plane, values in zip(planes, written, strict=True):
        strides = [n // 2 for n in (plane.token, plane.head, plane.channel)]
        start = (plane.offset + 3 * plane.page + 5 * plane.token) // 2
        assert torch.equal(tensor.reshape(-1).as_strided((20, 2, 64), strides, start), values)


def test_packed_tiles_of_vllm_stay_inside_the_span_of_their_head(cpu_kernel):
    """Copying one head's K and V span carries exactly that head to another page and slot."""
    source, target = (torch.zeros(6, 2, 32, 2 * 64, dtype=torch.bfloat16) for _ in "st")
    alone = torch.zeros_like(source)
    kernel_write(cpu_kernel, "amx", source, 0, seed=1)
    for plane in cpu_attn_opaque(View.of(source), Place(0, 0, source.data_ptr()), isa="amx"):
        span = slice(
            (plane.offset + 3 * plane.page + plane.head) // 2,
            (plane.offset + 3 * plane.page + plane.head + plane.page_bytes) // 2,
        )
        target.reshape(-1)[span] = source.reshape(-1)[span]
    alone[3, 1] = source[3, 1]
    assert torch.equal(target, alone)
    assert source[3].any() and not source[:3].any() and not source[4:].any()
