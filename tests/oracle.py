"""What a KV cache holds, read and written by each framework's own indexing of its tensors.

Nothing here knows planes, strides in bytes or plans: it may not import neuron_push at all. A test
fills prefill caches by logical position, moves bytes however the code under test says, and compares
decode caches by logical position.
"""

import numpy as np
import torch

KINDS = {"mla": ("latent",)}
# Interiors that exist only as whole pages: their last page may be written to its end.
UNCUT = {
    "vec": ("k",),
    "amx": ("k", "v"),
    "transposed": ("k",),
    "tiled": ("k",),
    "fp8": ("k",),
}
# Layouts whose tensors of all layers share one allocation.
SHARED = ("blocks_outermost", "heads_outermost")
# Caches of NxD Inference: K and V in tensors of their own.
APART = ("contiguous", "transposed", "tiled", "block", "tiled_block")


def kinds_of(layout):
    return KINDS.get(layout, ("k", "v"))


def uncut(layout, kind):
    return kind in UNCUT.get(layout, ())


def value(layer, kind, head, token, channel):
    """A number that no other position of a test has (broadcasts over arrays)."""
    number = layer * 3 + ("k", "v", "latent").index(kind)
    number = number * 16 + head
    number = number * 1024 + token
    return number * 64 + channel + 1


class Cache:
    """One rank's tensors. `tensors[layer]` is what the framework would register."""

    def __init__(self, layout, layers, heads, pages, tokens, width):
        self.layout, self.layers, self.heads = layout, tuple(layers), tuple(heads)
        self.pages, self.tokens, self.width = pages, tokens, width
        shape = (pages, len(heads), tokens, 2 * width)
        self.stores, self.tensors = [], {}
        if layout in SHARED:
            self._allocate_shared(shape)
        else:
            for layer in self.layers:
                self.tensors[layer] = self._allocate(shape)
        # Tiles of a packing kernel: some fixed order that is neither (N, D) nor (D, N).
        order = np.random.default_rng(tokens * 1000 + width).permutation(tokens * width)
        self._order, self._inverse = order, np.argsort(order)

    def _new(self, *shape):
        store = torch.full(shape, -1, dtype=torch.int32)
        self.stores.append(store)
        return store

    def _allocate_shared(self, shape):
        pages, heads, tokens, both = shape
        depth = len(self.layers)
        if self.layout == "blocks_outermost":
            store = self._new(pages, depth, heads, tokens, both)
            self.tensors = {layer: store[:, i] for i, layer in enumerate(self.layers)}
        else:
            store = self._new(pages, heads, depth, tokens, both)
            self.tensors = {layer: store[:, :, i] for i, layer in enumerate(self.layers)}

    def _allocate(self, shape):
        pages, heads, tokens, both = shape
        width = both // 2
        match self.layout:
            case "interleaved" | "vec" | "amx":
                return self._new(*shape)
            case "token_major":
                return self._new(pages, tokens, heads, both).permute(0, 2, 1, 3)
            case "neuron":
                return self._new(2, pages, heads, tokens, width)
            case "nhd":
                return self._new(2, pages, tokens, heads, width)
            case "old_hnd":
                return self._new(2, pages, heads, tokens, width).permute(0, 1, 3, 2, 4)
            case "mla":
                return self._new(pages, tokens, width)
            case "block_first":
                return self._new(pages, 2, heads, tokens, width)
            case "fp8":
                both = self._new(2, pages, heads, tokens, width)
                return both[0].view(pages, heads, tokens // 2, width, 2), both[1]
        return self._allocate_apart(pages, heads, tokens, width)

    def _allocate_apart(self, pages, heads, tokens, width):
        tiles = 2 if tokens % 2 == 0 else 1
        tile = tokens // tiles
        match self.layout:
            case "contiguous":
                shapes = [(pages, heads, tokens, width)] * 2
            case "transposed":
                shapes = [(pages, heads, width, tokens), (pages, heads, tokens, width)]
            case "tiled":
                shapes = [(pages, heads, width, tiles, tile), (pages, heads, tiles, tile, width)]
            case "block":
                shapes = [(pages, tokens, heads, width)] * 2
            case "tiled_block":
                shapes = [(pages, tiles, tile, heads, width)] * 2
            case _:
                raise AssertionError(self.layout)
        return tuple(self._new(*shape) for shape in shapes)

    def _apart(self, layer, kind):
        """A view as (pages, heads, tokens, channels); tiles are merged as NxD Inference does."""
        array = self.tensors[layer][kind == "v"].numpy()
        sizes = (self.pages, len(self.heads), self.tokens, self.width)
        pages, heads, tokens, width = sizes
        match self.layout, kind:
            case ("transposed" | "tiled", "k"):
                view = array.reshape(pages, heads, width, tokens).swapaxes(2, 3)
            case ("block" | "tiled_block", _):
                view = array.reshape(pages, tokens, heads, width).swapaxes(1, 2)
            case _:
                view = array.reshape(sizes)
        assert np.shares_memory(view, array)
        return view

    def store_of(self, layer):
        """Index of the allocation that holds a layer."""
        return 0 if self.layout in SHARED else self.layers.index(layer)

    def memory(self):
        """Every allocation as writable bytes."""
        return [store.numpy().reshape(-1).view(np.uint8) for store in self.stores]

    def _view(self, layer, kind):
        """(pages, heads, tokens, channels), except for packed tiles: (pages, heads, elements)."""
        if self.layout in APART or self.layout == "fp8":
            return self._apart(layer, kind)
        tensor, width, tokens = self.tensors[layer].numpy(), self.width, self.tokens
        half = 0 if kind == "k" else 1
        match self.layout:
            case "neuron":
                return tensor[half]
            case "nhd" | "old_hnd":
                return tensor[half].transpose(0, 2, 1, 3)
            case "mla":
                return tensor[:, None]
            case "block_first":
                return tensor[:, half]
            case "vec" | "amx":
                rows = tensor.reshape(self.pages, len(self.heads), 2 * tokens, width)
                rows = rows[:, :, half * tokens : (half + 1) * tokens]
                flat = rows.reshape(self.pages, len(self.heads), tokens * width)
                assert np.shares_memory(flat, tensor)
                if self.layout == "amx":
                    return flat
                if kind == "v":
                    return rows
                return flat.reshape(self.pages, len(self.heads), width, tokens).swapaxes(2, 3)
        return tensor[..., half * width : (half + 1) * width]

    def read(self, layer, kind):
        """A copy as (pages, heads, tokens, channels)."""
        if (self.layout, kind) == ("fp8", "k"):
            pairs = self.tensors[layer][0].numpy().swapaxes(3, 4)
            return pairs.reshape(self.pages, len(self.heads), self.tokens, self.width)
        view = self._view(layer, kind)
        if self.layout == "amx":
            plain = view[:, :, self._inverse]
            return plain.reshape(self.pages, len(self.heads), self.tokens, self.width)
        return view.copy()

    def write(self, layer, kind, values):
        if (self.layout, kind) == ("fp8", "k"):
            pairs = values.reshape(*values.shape[:2], self.tokens // 2, 2, self.width)
            self.tensors[layer][0].numpy()[...] = pairs.swapaxes(3, 4)
            return
        view = self._view(layer, kind)
        if self.layout == "amx":
            values = values.reshape(self.pages, len(self.heads), -1)[:, :, self._order]
        view[...] = values


class States:
    """A conv and an SSM state per layer and request, both cut out of one raw page, as vLLM does."""

    CONV, SSM, PAGE = (4, 3), (2, 4), 64  # elements of 2 and of 4 bytes; bytes with a gap behind

    def __init__(self, layers, pages):
        self.stores, self.tensors = [], {}
        for layer in layers:
            store = torch.full((pages, self.PAGE), -1, dtype=torch.int8)
            self.stores.append(store)
            conv = store.view(torch.int16).as_strided((pages, *self.CONV), (32, 3, 1), 0)
            ssm = store.view(torch.int32).as_strided((pages, *self.SSM), (16, 4, 1), 6)
            self.tensors[layer] = conv, ssm

    def _values(self, layer):
        for number, tensor in enumerate(self.tensors[layer]):
            size = tensor[0].numel()
            values = torch.arange(size) + 1 + 100 * layer + 50 * number
            yield tensor, values.reshape(tensor[0].shape).to(tensor.dtype)

    def fill(self, page):
        """The known state of one request; noise everywhere else."""
        for layer, store in zip(self.tensors, self.stores, strict=True):
            store.random_(-128, 127)
            for tensor, values in self._values(layer):
                tensor[page] = values

    def snapshot(self):
        return [tensor.clone() for both in self.tensors.values() for tensor in both]

    def compare(self, before, page):
        """One page holds the known state, and no tensor changed elsewhere."""
        place = iter(before)
        for layer in self.tensors:
            for tensor, values in self._values(layer):
                expected = next(place).clone()
                expected[page] = values
                assert torch.equal(tensor, expected), layer


def place(cache, blocks, block_tokens, first, token):
    """(page, token in page) of a token, or None where the list has a hole."""
    index = token // block_tokens - first
    if not 0 <= index < len(blocks) or blocks[index] == 0:
        return None
    inside = token % block_tokens
    page = blocks[index] * (block_tokens // cache.tokens) + inside // cache.tokens
    return int(page), inside % cache.tokens


def fill(cache, blocks, block_tokens, first, stop, layer_kinds=None):
    """Write the known values of tokens [0, stop); every other slot gets noise."""
    rng = np.random.default_rng(7)
    channels = np.arange(cache.width)
    for layer in cache.layers:
        for kind in kinds_of(cache.layout):
            shape = (cache.pages, len(cache.heads), cache.tokens, cache.width)
            values = rng.integers(-(2**30), -2, shape, dtype=np.int32)
            for token in range(stop):
                slot = place(cache, blocks, block_tokens, first, token)
                if slot is not None:
                    for row, head in enumerate(cache.heads):
                        values[slot[0], row, slot[1]] = value(layer, kind, head, token, channels)
            cache.write(layer, kind, values)


def out_of_window(block_tokens, oldest):
    """Tokens of decode's oldest block that lie before the window: nobody reads them."""
    return range(oldest - oldest % block_tokens, oldest)


def compare(cache, before, blocks, block_tokens, first, start, stop, wanted=None, vague=()):
    """Decode holds exactly [start, stop) of every head and layer, and nothing else changed.

    `before` maps (layer, kind) to what `read` gave earlier. `wanted(token)` restricts the tokens.
    Two exceptions are documented: behind the last token, what a page that cannot be cut holds may
    be anything; and so may, of K and V alike, the `vague` tokens (`out_of_window`) if a sliding
    window goes through a slab.
    """
    channels = np.arange(cache.width)
    for layer in cache.layers:
        for kind in kinds_of(cache.layout):
            expected, got = before[layer, kind].copy(), cache.read(layer, kind)
            for token in range(start, stop):
                slot = place(cache, blocks, block_tokens, first, token)
                if slot is None or (wanted and not wanted(token)):
                    continue
                for row, head in enumerate(cache.heads):
                    expected[slot[0], row, slot[1]] = value(layer, kind, head, token, channels)
                if token == stop - 1 and uncut(cache.layout, kind):
                    # The first exception: the rest of the last page.
                    tail = slice(slot[1] + 1, None)
                    expected[slot[0], :, tail] = got[slot[0], :, tail]
            for slot in (place(cache, blocks, block_tokens, first, token) for token in vague):
                if slot is not None:
                    expected[slot[0], :, slot[1]] = got[slot[0], :, slot[1]]
            assert np.array_equal(expected, got), (layer, kind)


def snapshot(cache):
    return {
        (layer, kind): cache.read(layer, kind)
        for layer in cache.layers
        for kind in kinds_of(cache.layout)
    }


def replay(source_memory, destination_memory, copies, written):
    """Move the bytes of (region, offset, region, offset, length) rows; count writes per byte."""
    for read_region, read, write_region, write, length in copies:
        data = source_memory[read_region][read : read + length]
        assert len(data) == length
        destination_memory[write_region][write : write + length] = data
        written[write_region][write : write + length] += 1
