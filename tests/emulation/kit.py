"""Emulated devices without vLLM: caches, requests and a hand-made scheduler."""

from collections import deque
from types import SimpleNamespace

import numpy as np
import torch

from neuron_push.emulation import cost, memory
from neuron_push.emulation.devices import DEVICES
from neuron_push.emulation.faults import Faults
from neuron_push.emulation.memory import GroupShape
from neuron_push.emulation.oracle import Oracle
from neuron_push.emulation.report import Reporter
from neuron_push.emulation.requests import Requests
from neuron_push.emulation.writer import Writer

LAYERS, HEADS, WIDTH, ELEMENT = 3, 2, 8, 4


def shape(device="p5en", *, block=0, heads=range(HEADS), layers=range(LAYERS), latent=False,
          window=0):  # fmt: skip
    names = tuple(DEVICES[device].layer_name.format(index=index) for index in layers)
    return GroupShape(
        names, tuple(layers), (0,) if latent else tuple(heads),
        block or DEVICES[device].block_tokens, WIDTH * ELEMENT, ELEMENT, torch.float32, latent,
        window,
    )  # fmt: skip


STATE_WORDS = 28


def state_shape(*, layers=range(LAYERS, LAYERS + 2), rank=0):
    """A group that keeps a state per request, in pages as large as those of `shape()`."""
    return GroupShape(
        tuple(f"model.layers.{index}.mixer" for index in layers), tuple(layers), (rank,), 1,
        8 * STATE_WORDS, ELEMENT, torch.float32, False, 0, True, shape().page_bytes,
    )  # fmt: skip


def cache(device="p5en", *, blocks=16, **options):
    return memory.allocate(DEVICES[device], (shape(device, **options),), blocks)


def hybrid_cache(device="p5en", *, blocks=16, **options):
    return memory.allocate(DEVICES[device], (shape(device), state_shape(**options)), blocks)


def output(*, new=(), cached=(), scheduled=None, finished=(), preempted=(),
           sampling=None):  # fmt: skip
    """A SchedulerOutput as far as a model runner reads it."""
    return SimpleNamespace(
        scheduled_new_reqs=[
            SimpleNamespace(
                req_id=name, prompt_token_ids=tokens, prefill_token_ids=tokens,
                prompt_len=len(tokens), block_ids=as_groups(blocks), num_computed_tokens=computed,
                sampling_params=sampling,
            )
            for name, tokens, blocks, computed in new
        ],
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=[row[0] for row in cached],
            new_block_ids=[row[1] and as_groups(row[1]) for row in cached],
            num_computed_tokens=[row[2] for row in cached],
            resumed_req_ids={row[0] for row in cached if len(row) > 3},
            all_token_ids={row[0]: row[3] for row in cached if len(row) > 3},
        ),
        num_scheduled_tokens=scheduled or {},
        finished_req_ids=set(finished), preempted_req_ids=set(preempted),
        has_structured_output_requests=False,
    )  # fmt: skip


def as_groups(blocks):
    """A block list per group: a plain list stands for one group."""
    return blocks if isinstance(blocks, tuple) else (blocks,)


class Engine:
    """One rank with a trivial scheduler: one request, a fixed block table."""

    def __init__(self, device="p5en", *, fault="", checking=None, folder="", name="engine",
                 combine=None, profile="instant", state_tokens=0, layers_apart=False,
                 **options):  # fmt: skip
        """`state_tokens` adds a state group, with a state per so many tokens."""
        self.cache = (hybrid_cache if state_tokens else cache)(device, **options)
        self.reporter = Reporter(str(folder), name)
        self.clock = cost.VirtualClock()
        self.writer = Writer(
            Oracle(self.cache, 0), cost.profile(profile), self.reporter, checking=checking,
            combine=combine, clock=self.clock, meddle=Faults(self.cache, fault),
            early_fence=fault == "early-fence", layers=LAYERS if layers_apart else 0,
        )  # fmt: skip
        self.launched = deque()
        size = self.cache.shapes[0].block_tokens
        sizes = (size, state_tokens) if state_tokens else (size,)
        windows = tuple(group.window for group in self.cache.shapes)
        self.requests = Requests(sizes, windows, state_groups=(1,) if state_tokens else ())

    def launch(self, **step):
        """Launch without working it off."""
        step = self.writer.launch(self.requests.update(output(**step)))
        self.launched.append(step)
        return self.writer.fence()

    def work(self):
        """Work off the oldest launch; its tokens."""
        step = self.launched.popleft()
        self.writer.execute(step)
        return step.sampled

    def step(self, **step):
        self.launch(**step)
        return self.work()

    def generate(self, prompt, blocks, count, *, computed=0, chunk=1000):
        """Prefill from `computed` on in chunks, then decode."""
        answer, start, new = [], computed, [("r", prompt, blocks, computed)]
        while len(answer) < count:
            tokens = min(chunk, len(prompt) - start) if start < len(prompt) else 1
            cached = () if new else [("r", None, start)]
            answer += self.step(new=new, cached=cached, scheduled={"r": tokens})[0]
            start, new = start + tokens, ()
        return answer

    @property
    def seen(self):
        return self.reporter.summary


def hand_over(source, target, prompt_tokens, source_blocks, target_blocks):
    """Copy KV token by token through the tensors themselves, as a correct transfer would."""
    there, here = source.cache, target.cache
    for giving, taking in zip(there.views[0], here.views[0], strict=True):
        for position in range(prompt_tokens):
            from_block, from_slot = divmod(position, there.shapes[0].block_tokens)
            to_block, to_slot = divmod(position, here.shapes[0].block_tokens)
            row = giving.tensor[source_blocks[from_block], from_slot]
            if giving.order != taking.order:
                axes = [giving.order.index(axis) for axis in taking.order]
                row = row.permute(*axes)
            taking.tensor[target_blocks[to_block], to_slot] = row


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(33, 126, length).tolist()
