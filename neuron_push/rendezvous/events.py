"""What goes into the core and what comes out of it.

The core never calls anything: it takes an event and the time, and returns actions for the
driver (`neuron_push.transfer`) to carry out in order. Commands of the engine
(`neuron_push.commands`) are events too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from neuron_push.commands import Command, Report
from neuron_push.geometry import Geometry, Region
from neuron_push.plan import Blocks, Plan, StagedPlan
from neuron_push.protocol import (
    Address,
    Done,
    EngineInfo,
    Hello,
    Notification,
    Refusal,
    Welcome,
)
from neuron_push.transport import AgentName, WriteId

# ------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Opened:
    """A generation's agent exists; greet and move peers with it."""

    generation: int
    agent: AgentName
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Closed:
    """A generation's agent is destroyed: nothing lands through it any more."""

    generation: int


@dataclass(frozen=True, slots=True)
class EngineFound:
    """Both listeners have answered: the prefill engine's and our own."""

    address: Address
    info: EngineInfo
    own: EngineInfo


@dataclass(frozen=True, slots=True)
class EngineMissing:
    """The prefill engine could not be asked, or its answer does not serve."""

    address: Address
    reason: str


@dataclass(frozen=True, slots=True)
class Greeted:
    """A prefill rank has answered our hello."""

    link: int
    answer: Welcome | Refusal


@dataclass(frozen=True, slots=True)
class HelloArrived:
    """A decode rank says hello; `token` names the question to answer."""

    token: object
    hello: Hello


@dataclass(frozen=True, slots=True)
class Notified:
    """A notification has arrived from a peer's agent."""

    agent: AgentName
    message: Notification


@dataclass(frozen=True, slots=True)
class Garbage:
    """A notification that could not be decoded."""

    agent: AgentName
    reason: str


@dataclass(frozen=True, slots=True)
class Unreachable:
    """The transport says that a peer's agent is gone, or refuses to load or reach it."""

    agent: AgentName
    reason: str


@dataclass(frozen=True, slots=True)
class WriteEnded:
    """done: landed. unposted: nothing was started. broken: bytes may still move."""

    write: WriteId
    outcome: Literal["done", "unposted", "broken"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ReadEnded:
    """done: the bytes are here. unposted: nothing was started. broken: bytes may still move."""

    read: WriteId
    outcome: Literal["done", "unposted", "broken"]
    reason: str = ""
    nbytes: int = 0


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A piece is in decode's pages, and good; `reason` says why not if it is not."""

    job: int
    reason: str = ""
    corrupt: bool = False  # its digest is another


@dataclass(frozen=True, slots=True)
class Sealed:
    """The digest of what a decode rank READ of us is taken; `reason` says why not if it is not."""

    link: int
    attempt: int  # its number on the wire
    digest: bytes = b""
    reason: str = ""


Event = (
    Command
    | Opened
    | Closed
    | EngineFound
    | EngineMissing
    | Greeted
    | HelloArrived
    | Notified
    | Garbage
    | Unreachable
    | Unpacked
    | Sealed
    | ReadEnded
    | WriteEnded
)

# ------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Open:
    """Create the agent of this generation over the same memory; answer with Opened."""

    generation: int


@dataclass(frozen=True, slots=True)
class Close:
    """Destroy the agent of this generation; answer with Closed."""

    generation: int


@dataclass(frozen=True, slots=True)
class FindEngine:
    """Ask the listener at this address, and our own, who they are."""

    address: Address


@dataclass(frozen=True, slots=True)
class Greet:
    """Send a hello to a prefill rank's side channel; answer with Greeted."""

    link: int
    address: Address
    hello: Hello


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer a hello; with a Welcome, load the caller's metadata first."""

    token: object
    message: Welcome | Refusal
    generation: int = 0
    metadata: bytes = b""


@dataclass(frozen=True, slots=True)
class Load:
    """Make a peer's agent known to one of our generations."""

    generation: int
    agent: AgentName
    metadata: bytes


@dataclass(frozen=True, slots=True)
class Forget:
    """Remove a peer's agent from one of our generations."""

    generation: int
    agent: AgentName


@dataclass(frozen=True, slots=True)
class Notify:
    """Send a notification to a peer's agent through one of our generations."""

    generation: int
    agent: AgentName
    message: Notification


@dataclass(frozen=True, slots=True)
class Post:
    """Start a WRITE; answer with WriteEnded.

    With a staged plan an image lies in `slab`, which is ours and is to be packed first, or in
    `granted`, which is the peer's, or goes from one to the other. `last` sends state pages too.
    """

    write: WriteId
    generation: int
    agent: AgentName
    plan: Plan
    destination: Geometry
    source_blocks: tuple[Blocks, ...]
    destination_blocks: tuple[Blocks, ...]
    done: Done
    slab: Region | None = None
    granted: Region | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class Fetch:
    """Start a READ of tokens [start, stop); answer with ReadEnded.

    With a staged plan it fills `slab`, which is ours. `last` READs state pages too.
    """

    read: WriteId
    attempt: int
    generation: int
    agent: AgentName
    plan: Plan
    source: Geometry
    source_blocks: tuple[Blocks, ...]
    destination_blocks: tuple[Blocks, ...]
    start: int
    stop: int
    slab: Region | None = None
    last: bool = False


@dataclass(frozen=True, slots=True)
class Unpack:
    """Bring tokens [start, stop) from one of our slabs into their blocks; answer with Unpacked."""

    job: int
    plan: StagedPlan
    start: int
    stop: int
    blocks: tuple[Blocks, ...]
    slab: int
    done: Done | None = None  # with the digest to compare first
    last: bool = False


@dataclass(frozen=True, slots=True)
class Seal:
    """Take the digest of what a decode rank has READ of our blocks; answer with Sealed.

    It is of the bytes of tokens [start, stop) in ascending order of where they went.
    """

    link: int
    attempt: int  # its number on the wire
    plan: Plan
    destination: Geometry
    source_blocks: tuple[Blocks, ...]
    destination_blocks: tuple[Blocks, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Check:
    """Compare what has landed in blocks for `done` with its digest; answer with Unpacked.

    `source_blocks` are the prefill rank's where they are known: of what we READ ourselves.
    """

    job: int
    plan: Plan
    start: int
    stop: int
    blocks: tuple[Blocks, ...]
    done: Done
    last: bool
    source_blocks: tuple[Blocks, ...] = ()


@dataclass(frozen=True, slots=True)
class Tell:
    """Pass a report to the engine."""

    report: Report


@dataclass(frozen=True, slots=True)
class Count:
    """Something to count or to measure; `label` is the metric's one label, if it has one."""

    name: str
    value: float = 1.0
    label: str = field(default="")


@dataclass(frozen=True, slots=True)
class Note:
    """Something an operator wants to find in the log."""

    text: str


Action = (
    Open
    | Close
    | FindEngine
    | Greet
    | Answer
    | Load
    | Forget
    | Notify
    | Post
    | Fetch
    | Unpack
    | Seal
    | Check
    | Tell
    | Count
    | Note
)
