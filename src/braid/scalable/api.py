"""Ports and values between scalable topics and the rest: `SegmentOps` (controller -> segments, near or far) and what is told to
consumers. Holds no state and does no I/O."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import msgspec

from braid.errors import BraidError, LedgerLost, StoreMismatch
from braid.model.hashranges import HashRange
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.model.retention import NextTrim
from braid.model.segments import SegmentEnd
from braid.scalable.records import Initial

UNTIL_REPAIRED: Final = (LedgerLost, StoreMismatch)
"""Errors by which an owner refuses a segment, or a subscription's cursor there, until somebody repairs it: to try again changes
nothing, and what waits for it must wait alone."""


class Retention(NamedTuple):
    """How long sealed segments are kept that nobody needs; -1 = for ever."""

    minutes: int = 0
    """After they were sealed."""
    unread_minutes: int = 0
    """After their last message, while the topic has no subscription; 0 = no longer than the others."""


class Sealed(msgspec.Struct, frozen=True, rename="camel"):
    """Answer to a terminate: where the segment ends, and the deduplication state its children must know."""

    position: Position
    producers: dict[str, int] = {}


class SegmentBacklog(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What one subscription has left in one segment."""

    messages: int
    is_terminated: bool
    consumers: tuple[str, ...] = ()
    """Names of the attached consumers."""
    closed: tuple[str, ...] = ()
    """Names that closed themselves and have not come back, as far as the owner knows."""

    @property
    def is_drained(self) -> bool:
        """Nothing is left and nothing can come (INV8)."""
        return self.is_terminated and self.messages == 0


class SegmentStats(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Load and backlog of one segment, as its owner sees them."""

    owner: str = ""
    msg_rate_in: float = 0.0
    bytes_rate_in: float = 0.0
    msg_rate_out: float = 0.0
    bytes_rate_out: float = 0.0
    messages: int = 0
    """All that were ever stored in it."""
    trimmed: int = 0
    """Of these, deleted since."""
    storage_size: int = 0
    producers: int = 0
    backlog: dict[str, int] = {}
    """Messages by subscription."""
    consumers: dict[str, tuple[str, ...]] = {}
    """Names of attached consumers by subscription."""
    readers: int = 0
    """Attached readers without a durable subscription that have not been sent everything yet."""
    is_terminated: bool = False
    end: SegmentEnd | None = None
    """Once it is terminated."""
    blocked_by: dict[str, tuple[BlockedBy, ...]] = {}
    """By subscription, if it is held up here: open transactions."""
    undecided: int = 0
    """Transactions that wrote here, or were about to, and are not decided yet."""
    last_append_ms: int = 0
    """When its last entry was stored; 0 if it has none."""
    next_trim: NextTrim = NextTrim()
    """What of it is deleted next, and when."""


class SegmentOps(Protocol):
    """What a controller does to segments, wherever their owners are. `segment` is always the physical name.

    `epoch` is the leader's epoch and `incarnation` the topic's: owners refuse a stale leader (StaleLeader) and another
    incarnation (INV4, INV5), in everything that changes something. A regular topic has no record to compare them with; its
    incarnation is empty. `operation` is the id of the subscription's pending operation that a call is part of, or empty: owners
    refuse what comes after that has ended. All are repeatable. Any may raise NotReady, TransportError or DeadlineExceeded: try
    again later; after those nobody knows whether it was done.
    """

    async def create(
        self,
        segment: TopicName,
        *,
        subscriptions: Mapping[str, Initial],
        producers: Mapping[str, int],
        epoch: int,
        incarnation: str,
    ) -> None:
        """Make the segment's topic if need be, with cursors for these subscriptions and this deduplication state."""
        ...

    async def terminate(self, segment: TopicName, *, epoch: int, incarnation: str) -> Sealed:
        """Seal durably; returns only then (INV7). Raises TopicNotFound."""
        ...

    async def delete(self, segment: TopicName, *, epoch: int, incarnation: str) -> None:
        """Delete the topic with its data, cursors and clients. A missing one is fine."""
        ...

    async def subscriptions(self, segment: TopicName) -> list[str]:
        """Durable subscriptions that have a cursor there (internal ones left out). Raises TopicNotFound."""
        ...

    async def create_subscription(
        self, segment: TopicName, subscription: str, initial: Initial, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        """Make the cursor if there is none. Raises TopicNotFound."""
        ...

    async def delete_subscription(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        """Remove the cursor, closing its consumers. Missing topic or cursor is fine."""
        ...

    async def backlog(self, segment: TopicName, subscription: str) -> SegmentBacklog:
        """Raises TopicNotFound, SubscriptionNotFound."""
        ...

    async def seek(
        self, segment: TopicName, subscription: str, timestamp_ms: int, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        """Reset the cursor to the first message appended at or after the time, 0 = the beginning; consumers are closed and come
        back. Raises TopicNotFound, SubscriptionNotFound."""
        ...

    async def skip_all(
        self, segment: TopicName, subscription: str, *, epoch: int, incarnation: str, operation: str = ""
    ) -> None:
        """Acknowledge everything there is. Raises TopicNotFound, SubscriptionNotFound."""
        ...

    async def stats(self, segment: TopicName) -> SegmentStats:
        """Raises TopicNotFound."""
        ...

    async def settle(self, segment: TopicName) -> None:
        """Finish what transactions that ended have left there. Raises TopicNotFound."""
        ...


LogOf: TypeAlias = Callable[[TopicName], Awaitable[str | None]]
"""Incarnation of the log that a regular topic or partition is now, read fresh, wherever it is served; None = it has none."""
RegistrationNumber: TypeAlias = tuple[int, int]
"""Epoch of the leader that gave it, and a count: later registrations of a consumer's name have higher ones, whoever leads."""


class AssignedSegment(msgspec.Struct, frozen=True):
    """A segment in a consumer's assignment."""

    segment_id: int
    hash_range: HashRange
    topic: str
    """Physical name of what to subscribe to."""
    place: bytes | None = None
    """In a checkpoint group: where the group stands; empty is the beginning, None = not known."""


class ConsumerAssignment(msgspec.Struct, frozen=True):
    """What one stream or checkpoint consumer is to read."""

    layout_epoch: int
    segments: tuple[AssignedSegment, ...] = ()
    number: RegistrationNumber | None = None
    """In the answer to a registration: its number, to be given when it is made again with another leader."""
    resets: int = 0
    """How often the subscription was reset: what a consumer knows from before the last time is void."""
    term: int = 0
    """In a checkpoint group: epoch of the leader that made it."""
    is_partial: bool = False
    """In a checkpoint group: more is meant for this member, once others have handed it over."""
    owed: tuple[int, ...] = ()
    """In a checkpoint group: what this member has to let go of, saying where it stopped."""


class PlaceReport(msgspec.Struct, frozen=True):
    """A member of a checkpoint group says where it stands in segments."""

    term: int
    """Of the assignment that it had then."""
    places: Mapping[int, bytes | None]
    """By segment; None if it has none to tell."""
    released: frozenset[int] = frozenset()
    """Segments of these that were taken from it, of which it hands out nothing any more."""


class ConsumerHandle(Protocol):
    """The connection of a registered consumer, as a coordinator sees it. Compared by identity."""

    def push(self, assignment: ConsumerAssignment) -> None:
        """Tell the consumer its new assignment."""
        ...

    def displaced(self) -> None:
        """Another connection took the name: close this consumer (CLOSE_CONSUMER)."""
        ...

    def ended(self, error: BraidError) -> None:
        """Nobody coordinates this consumer here any more: the leadership moved, or the subscription is gone. It has to
        register again, wherever the leader is then."""
        ...


class ConsumerRegistration(msgspec.Struct, frozen=True, eq=False):
    """A consumer that asks for segments (command 73)."""

    consumer_name: str
    consumer_id: int
    handle: ConsumerHandle
    number: RegistrationNumber | None = None
    """Of a registration that moves to another leader; None if it is new."""
    says_goodbye: bool = False
    """Whether its client tells when it leaves, so that its absence from segments says nothing."""
    hands_over: bool = False
    """Whether it says where it stopped when a segment is taken from it (checkpoint groups)."""


class BlockedBy(msgspec.Struct, frozen=True, kw_only=True):
    """Why a subscription does not go on (settled.md): one element of `blocked_by`."""

    kind: str
    """draining-parent, consumer-away, no-consumer, open-transaction, unreadable-record."""
    segment: int | None = None
    detail: dict[str, Any] = {}
    since: int = 0
    """Milliseconds since the epoch."""
