"""Planes from tensors: one builder per way a framework arranges K and V.

Who knows the attention backend picks the builder; a builder takes strides from the tensor it is
given and never guesses an arrangement from a shape. All results are in bytes.

B pages, H heads on the rank, N tokens per page, D channels, S tokens of a whole sequence:

    interleaved        (B, H, N, 2D)      K row and V row side by side per token
    split_first        (2, B, H, N, D)    V is a second array behind K; or tokens before heads
    block_first        (B, 2, H, N, D)    K and V of a page follow each other
    cpu_attn_vec       (B, H, N, 2D)      per (page, head) K as (D, N), then V as (N, D)
    cpu_attn_opaque    (B, H, N, 2D)      per (page, head) K tiles, then V tiles
    mla                (B, N, D)          one latent row per token
    single             any order          K or V alone in a tensor: the caches of NxD Inference
    fp8_packed_key     (B, H, N/2, D, 2)  K of two tokens side by side per channel: opaque
    state              (B, ...) each      Mamba: conv and ssm state of a request in one page

Groups add what tensors do not say. With a kernel block smaller than the scheduler's, tensors have
pages of the smaller size (`Group.page_tokens`) and `Group.block_tokens` is the scheduler's. A
sliding-window group has the planes of its backend; only its block lists differ.
"""

from neuron_push.layouts.neuron import fp8_packed_key, single
from neuron_push.layouts.state import state
from neuron_push.layouts.view import Place, TensorLike, View
from neuron_push.layouts.vllm import (
    block_first,
    cpu_attn_opaque,
    cpu_attn_vec,
    interleaved,
    mla,
    split_first,
)

__all__ = [
    "Place",
    "TensorLike",
    "View",
    "block_first",
    "cpu_attn_opaque",
    "cpu_attn_vec",
    "fp8_packed_key",
    "interleaved",
    "mla",
    "single",
    "split_first",
    "state",
]
