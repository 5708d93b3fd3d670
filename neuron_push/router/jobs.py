"""What a router knows of one request before any engine has seen it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from neuron_push.router.engines import Engine

# Bytes of text per token, as tokenizers of the Llama and Qwen families average on English.
# Only estimates depend on it.
BYTES_PER_TOKEN: Final = 4
# Tokens of answer to expect from a request that sets no limit.
USUAL_OUTPUT: Final = 256
# How much of a prompt names its prefix: long enough to pass a shared system prompt's beginning.
PREFIX_BYTES: Final = 1024


@dataclass(eq=False)
class Job:
    """One request, as policies see it."""

    prompt_tokens: int = 1
    output_tokens: int = USUAL_OUTPUT
    # Requests of one session like to meet the same engines; empty: no session.
    session: str = ""
    # Engines that failed it already.
    excluded: frozenset[Engine] = frozenset()
    # The engine of the other leg, once that is chosen.
    partner: Engine | None = None
    body: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, body: Mapping[str, Any], length: int, session: str = "") -> Job:
        """Estimate from a body of `length` bytes."""
        prompt = body.get("prompt")
        tokens = length // BYTES_PER_TOKEN
        if isinstance(prompt, list):
            if prompt and isinstance(prompt[0], int):
                tokens = len(prompt)
            elif prompt and isinstance(prompt[0], list):
                tokens = sum(len(each) for each in prompt if isinstance(each, list))
        limit = body.get("max_completion_tokens") or body.get("max_tokens")
        output = limit if isinstance(limit, int) and 0 < limit < 1 << 30 else USUAL_OUTPUT
        return cls(max(1, tokens), output, session, body=body)

    @property
    def tokens(self) -> int:
        """Tokens whose KV a decode engine holds in the end."""
        return self.prompt_tokens + self.output_tokens

    @cached_property
    def prefix(self) -> int:
        """A number for the beginning of the prompt: equal beginnings, equal numbers."""
        if "messages" in self.body:
            text = repr(self.body["messages"])[:PREFIX_BYTES]
        else:
            prompt = self.body.get("prompt", "")
            text = repr(prompt[: PREFIX_BYTES // 4] if isinstance(prompt, list) else prompt)
        return point(text[:PREFIX_BYTES])


def point(text: str) -> int:
    """A place on the ring of 64-bit numbers."""
    return int.from_bytes(blake2b(text.encode(errors="replace"), digest_size=8).digest(), "big")
