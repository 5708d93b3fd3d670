"""Geometries without engines: a model's shape, a platform's layout, a parallel degree.

For commands that explain and measure plans. Engines describe their real tensors instead
(`neuron_push.vllm.describe`). The table beside this module holds facts of public config files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec

from neuron_push import layouts
from neuron_push.errors import ConfigError
from neuron_push.geometry import Geometry, Group, GroupKind, Plane, Region, check

__all__ = ["PLATFORMS", "Model", "Platform", "geometries", "known_models", "load_model"]

# Far below any real address; nothing is read or written.
BASE: Final = 1 << 40
# Blocks of the imagined pool.
BLOCKS: Final = 64
MOST_RANKS: Final = 512
MOST_BLOCK: Final = 1 << 20  # tokens
ELEMENT_BYTES: Final[Mapping[str, int]] = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}

Layout = Literal["split_first", "block_first", "interleaved", "cpu_attn_vec"]


@dataclass(frozen=True, slots=True)
class Platform:
    """How one kind of engine stores KV, and whether it can bring bytes into another order."""

    name: str
    words: str
    layout: Layout
    block_tokens: int
    reorders: bool


PLATFORMS: Final[Mapping[str, Platform]] = {
    platform.name: platform
    for platform in (
        Platform("trn2", "vLLM Neuron on Trainium2, (2, B, H, N, D)", "split_first", 32, False),
        Platform(
            "trn2-block-first",
            "vLLM Neuron with block-first views, (B, 2, H, N, D)",
            "block_first",
            32,
            False,
        ),
        Platform("p5en", "vLLM CUDA from 0.28 on H200, (B, H, N, 2D)", "interleaved", 16, True),
        Platform("cuda-before-0.28", "older vLLM CUDA, (2, B, H, N, D)", "split_first", 16, True),
        Platform("cpu", "vLLM CPU_ATTN vec, K transposed", "cpu_attn_vec", 128, True),
    )
}


@dataclass(frozen=True, slots=True)
class Model:
    """What decides a KV cache: bytes of one element, heads, head size, and each layer's window."""

    name: str
    kv_heads: int
    head_size: int
    element: int
    windows: tuple[int, ...]  # per layer; 0 for full attention
    latent: bool = False  # MLA: one row of head_size elements per token
    states: int = 0  # layers that keep a state per request instead, and are in no geometry here

    @property
    def layers(self) -> int:
        """Number of layers with KV."""
        return len(self.windows)


def known_models() -> Mapping[str, Mapping[str, Any]]:
    """The shipped table: model name -> the fields of its public config.json that matter."""
    table: dict[str, Mapping[str, Any]] = json.loads(
        files("neuron_push").joinpath("shapes.json").read_text()
    )
    return table


def load_model(name: str, dtype: str = "") -> Model:
    """A model by its public name, or from a config.json or the folder that holds one.

    Raises:
        ConfigError: the name is neither, or the file lacks what is needed.
    """
    config = _read(name)
    if config is None:
        table = known_models()
        if name not in table:
            raise ConfigError(
                f"model {name!r} is not in the table and no config.json is there; known: "
                + ", ".join(sorted(table))
            )
        config = table[name]
    try:
        outer = msgspec.convert(config, _Nested)
        return _model(name, msgspec.convert(outer.text_config or config, _Config), dtype)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None


def _read(name: str) -> Any:
    """What a config.json holds, or None if there is none."""
    path = Path(name)
    try:
        path = path / "config.json" if path.is_dir() else path
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (OSError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None


Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]


class _Nested(msgspec.Struct):
    """A config, which may keep that of its language model apart."""

    text_config: dict[str, Any] | None = None


class _Config(msgspec.Struct):
    """The fields that decide a KV cache, by the names of public configs."""

    num_hidden_layers: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    num_attention_heads: Count | None = None
    num_key_value_heads: Count | None = None
    head_dim: Count | None = None
    hidden_size: Count | None = None
    kv_lora_rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] | None = None
    qk_rope_head_dim: Count | None = None
    torch_dtype: str | None = None
    dtype: str | None = None
    sliding_window: Annotated[int, msgspec.Meta(ge=0)] | None = None
    use_sliding_window: bool | None = None
    # Every such layer looks back on everything.
    sliding_window_pattern: Annotated[int, msgspec.Meta(ge=0)] | None = None
    layer_types: list[str] | None = None
    layers_block_type: list[str] | None = None

    def need(self, *fields: str) -> int:
        """The first of these that is there."""
        for field in fields:
            if (value := getattr(self, field)) is not None:
                return int(value)
        raise msgspec.ValidationError("config has no " + " or ".join(fields))


def _model(name: str, config: _Config, dtype: str) -> Model:
    dtype = dtype or config.torch_dtype or config.dtype or "bfloat16"
    if dtype not in ELEMENT_BYTES:
        raise ConfigError(f"{name}: dtype {dtype!r} is none of {', '.join(ELEMENT_BYTES)}")
    element, windows = ELEMENT_BYTES[dtype], _windows(name, config)
    states = config.num_hidden_layers - len(windows)
    if not windows:
        raise ConfigError(f"{name}: no layer of it has attention, so there is no KV to explain")
    if config.kv_lora_rank:
        width = config.kv_lora_rank + config.need("qk_rope_head_dim")
        return Model(name, 1, width, element, (0,) * len(windows), latent=True, states=states)
    heads = config.need("num_key_value_heads", "num_attention_heads")
    size = config.head_dim or config.need("hidden_size") // config.need("num_attention_heads")
    if not size:
        raise ConfigError(f"{name}: hidden_size is less than num_attention_heads")
    return Model(name, heads, size, element, windows, states=states)


def _windows(name: str, config: _Config) -> tuple[int, ...]:
    """The window of each layer with attention, 0 for all tokens."""
    layers, window = config.num_hidden_layers, config.sliding_window or 0
    if config.use_sliding_window is False:
        window = 0
    if kinds := config.layer_types or config.layers_block_type:
        if len(kinds) < layers:
            raise ConfigError(f"{name}: layer_types names {len(kinds)} of {layers} layers")
        # Linear attention and Mamba keep a state instead of KV.
        kept = [kind for kind in kinds[:layers] if "attention" in kind and "linear" not in kind]
        return tuple(window if "sliding" in kind else 0 for kind in kept)
    pattern = config.sliding_window_pattern or 0
    return tuple(0 if pattern and (i + 1) % pattern == 0 else window for i in range(layers))


def geometries(
    model: Model, platform: Platform, ranks: int, block_tokens: int = 0
) -> list[Geometry]:
    """One geometry per tensor-parallel rank; heads are divided or replicated as vLLM does."""
    if not 0 < ranks <= MOST_RANKS:
        raise ConfigError(f"a parallel degree is between 1 and {MOST_RANKS}, not {ranks}")
    if model.kv_heads % ranks and ranks % model.kv_heads:
        raise ConfigError(f"{model.kv_heads} KV heads do not divide over {ranks} ranks")
    tokens = block_tokens or platform.block_tokens
    if not 0 < tokens <= MOST_BLOCK:
        raise ConfigError(f"a block has between 1 and {MOST_BLOCK} tokens, not {tokens}")
    return [_geometry(model, platform, _heads(model, rank, ranks), tokens) for rank in range(ranks)]


def _heads(model: Model, rank: int, ranks: int) -> tuple[int, ...]:
    each = max(1, model.kv_heads // ranks)
    first = rank * model.kv_heads // ranks
    return tuple(range(first, first + each))


def _geometry(model: Model, platform: Platform, heads: tuple[int, ...], tokens: int) -> Geometry:
    regions: list[Region] = []
    groups: list[Group] = []
    for window in sorted(set(model.windows)):
        planes: list[Plane] = []
        for layer in (i for i, other in enumerate(model.windows) if other == window):
            length = BLOCKS * tokens * model.head_size * model.element
            length *= 1 if model.latent else 2 * len(heads)
            base = BASE + len(regions) * (1 << 32)
            place = layouts.Place(layer, len(regions), base)
            planes += _planes(model, platform.layout, len(heads), tokens, place)
            regions.append(Region(base, length, "VRAM", 0))
        kind: GroupKind = "mla" if model.latent else ("sliding" if window else "full")
        group = Group(kind, tokens, tokens, BLOCKS, heads, tuple(planes), window)
        groups.append(group)
    geometry = Geometry(tuple(regions), tuple(groups), model.element)
    check(geometry)
    return geometry


def _planes(
    model: Model, layout: Layout, heads: int, tokens: int, place: layouts.Place
) -> tuple[Plane, ...]:
    size = model.head_size
    if model.latent:
        return layouts.mla(_view((BLOCKS, tokens, size), model, place), place)
    if layout == "split_first":
        return layouts.split_first(_view((2, BLOCKS, heads, tokens, size), model, place), place)
    if layout == "block_first":
        return layouts.block_first(_view((BLOCKS, 2, heads, tokens, size), model, place), place)
    view = _view((BLOCKS, heads, tokens, 2 * size), model, place)
    if layout == "interleaved":
        return layouts.interleaved(view, place)
    return layouts.cpu_attn_vec(view, place)


def _view(shape: tuple[int, ...], model: Model, place: layouts.Place) -> layouts.View:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return layouts.View(shape, tuple(strides), place.base, model.element)
