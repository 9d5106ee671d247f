"""`SegmentReads`: reading topics by ranges of message indexes, for those who keep positions themselves and read in bulk.

Owns where each segment is served and trying again: owners are looked up once and again after a refusal, what passes is waited
for until the operation's deadline. Layouts are those of sessions that stay open, so that a known topic costs no request. Knows
nothing of what is inside of entries.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import msgspec

from braid.client.connection import Connection
from braid.client.layouts import LayoutSession
from braid.client.namespace_topics import parse_pattern, topics_of
from braid.errors import (
    BraidError,
    DeadlineExceeded,
    IncarnationMismatch,
    InvalidArgument,
    MetadataFailure,
    NotReady,
    ProtocolError,
    TopicNotFound,
    TransportError,
    Unavailable,
    from_code,
)
from braid.model.hashranges import HashRange
from braid.model.layout import SegmentLayout
from braid.model.names import Domain, TopicName
from braid.model.segments import SegmentEnd, physical_name
from braid.wire import bulk
from braid.wire.client import Bulk

if TYPE_CHECKING:
    from braid.client.client import Client

log = logging.getLogger(__name__)
T = TypeVar("T")
PASSING: Final = (TransportError, Unavailable, MetadataFailure, DeadlineExceeded)
"""Answers, or none, after which the same request is worth another attempt."""
MAX_PAUSE: Final = 1.0
"""Between two attempts, in seconds."""
ATTEMPTS: Final = 3
"""For which the operation's time is enough if an owner does not answer at all: another may have the segment by then."""
DESCRIBED_AT_ONCE: Final = 200
"""Topics in one request; brokers take 1000."""
LOOKUPS_AT_ONCE: Final = 64
MAX_OWNERS: Final = 100_000
"""Segments whose broker is remembered."""
REGULAR: Final = f"{Domain.PERSISTENT.value}://"
MAX_INDEX: Final = (1 << 63) - 1
MAX_FETCH: Final = (1 << 32) - 1


class SegmentState(msgspec.Struct, frozen=True):
    """What a segment holds. Its messages are those of `[low, end)`; below `stable` nothing ever changes."""

    topic: str
    incarnation: str
    """Of the scalable topic it belongs to; of a regular topic or partition, that of its own log."""
    low: int
    stable: int
    end: int
    is_sealed: bool
    stored_bytes: int


class Fetched(msgspec.Struct):
    """Entries of a range: everything from its beginning up to `covered_to` is here, or hidden for ever."""

    covered_to: int
    last_index: list[int]
    """Of each entry, the index of its last message."""
    ledger_id: list[int]
    entry_id: list[int]
    append_ms: list[int]
    size: list[int]
    data: memoryview
    """Their bytes, as their producers sent them, one behind the other."""


class SegmentView(msgspec.Struct, frozen=True):
    """A segment as its topic's layout shows it."""

    id: int
    topic: str
    """The name to read it by."""
    hash_start: int
    hash_end: int
    parents: tuple[int, ...]
    children: tuple[int, ...]
    is_sealed: bool


class TopicView(msgspec.Struct, frozen=True):
    """The layout of a topic: all segments that are kept."""

    topic: str
    incarnation: str
    next_id: int
    epoch: int
    segments: dict[int, SegmentView]


class Pruned(msgspec.Struct, frozen=True):
    """Where segments ended that their topic does not have any more."""

    incarnation: str
    """Of the topic; empty if there is none, or the broker does not know of such ends."""
    ends: dict[int, SegmentEnd]


class SegmentReads:
    """Of one client: `client.segment_reads()`."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._clock = client.runtime.clock
        self._config = client.config
        self._patience = client.config.operation_timeout / ATTEMPTS
        self._sessions: dict[str, LayoutSession] = {}
        self._opening: dict[str, asyncio.Lock] = {}
        self._views: dict[str, tuple[SegmentLayout, TopicView]] = {}
        self._owners: dict[str, Connection] = {}
        self._logs: dict[str, str] = {}
        """Incarnations of the logs of regular topics and partitions. A topic's is that of its first partition."""

    async def close(self) -> None:
        """End the layout sessions. Idempotent."""
        self._client.forget(self)
        sessions, self._sessions = self._sessions, {}
        await asyncio.gather(*[session.close() for session in sessions.values()])

    # Layouts.

    async def topic(self, name: str) -> TopicView:
        """The newest layout of a topic, which must exist; asks nobody if it is known."""
        full = str(TopicName.parse(name))
        session = await self._session(full)
        layout, incarnation = session.layout, session.incarnation
        if not incarnation:  # a regular topic: it is the one that the log of its first partition belongs to
            first = str(physical_name(session.resolved, layout.all_segments[0]))
            incarnation = self._logs[first] if first in self._logs else await self._incarnation_of(first)
        known = self._views.get(full)
        if known is None or known[0] is not layout or known[1].incarnation != incarnation:
            known = self._views[full] = (layout, _view(full, session.resolved, layout, incarnation))
        return known[1]

    async def topics_matching(self, pattern: str) -> list[str]:
        """Full names of the topics that match `topic://tenant/namespace/regex`, `persistent://...`, or both if the pattern
        begins with the tenant; the expression is held against the whole last part of the name."""
        domains, namespace, expression = parse_pattern(pattern)
        found = await self._retry(lambda: topics_of(self._client, namespace, domains), f"the topics of {namespace}")
        return sorted({name for name in found if expression.fullmatch(TopicName.parse(name).local_name)})

    async def _session(self, topic: str) -> LayoutSession:
        async with self._opening.setdefault(topic, asyncio.Lock()):
            session = self._sessions.get(topic)
            if session is not None and session.failure is None:
                return session
            if session is not None:  # deleted, or made anew: whoever asks now means what is there now
                del self._sessions[topic]
                self._forget(topic)
                await session.close()
            self._client.keep(self)
            session = LayoutSession(self._client, topic, may_create=False)
            try:
                await session.open()
            except BaseException:
                await session.close()
                raise
            self._sessions[topic] = session
            return session

    def _forget(self, topic: str) -> None:
        known = self._views.pop(topic, None)
        for segment in known[1].segments.values() if known is not None else ():
            self._logs.pop(segment.topic, None)

    async def _incarnation_of(self, topic: str) -> str:
        states = await self.states([topic])
        if topic not in states:
            raise TopicNotFound(f"The topic {topic} does not exist.")
        return states[topic].incarnation

    async def pruned(self, name: str) -> Pruned:
        """Where the segments ended that the topic does not have any more, as far as that is remembered: at least of those that
        any layout seen so far does not show, and that were not removed too long ago."""
        full = str(TopicName.parse(name))

        async def ask() -> Any:
            connection = await self._client.service_connection()
            return await connection.request(lambda number: bulk.pruned_segments(number, full))

        body = await self._retry(ask, f"the ends of removed segments of {full}")
        return Pruned(
            body.incarnation,
            {
                each.segment_id: SegmentEnd(
                    each.end_index,
                    each.ledger_id,
                    each.entry_id,
                    HashRange(each.hash_start, each.hash_end) if each.HasField("hash_end") else None,
                )
                for each in body.pruned
            },
        )

    # Reading.

    async def states(self, topics: Sequence[str]) -> dict[str, SegmentState]:
        """What these segments hold, by the names that were given; one that is gone is left out."""
        names = {topic: str(TopicName.parse(topic)) for topic in topics}
        found = await self._describe(dict.fromkeys(names.values()))
        self._logs.update({name: state.incarnation for name, state in found.items() if name.startswith(REGULAR)})
        return {topic: found[name] for topic, name in names.items() if name in found}

    async def offset_for(
        self, topic: str, incarnation: str, start: int, *, max_messages: int | None, max_bytes: int | None
    ) -> int:
        """Where a range that begins at `start` ends, so that it holds no more than this: beyond `start`, unless there is
        nothing stable behind it. Raises DataLost, IncarnationMismatch."""
        _check_index("start", start)
        for name, limit in (("max_messages", max_messages), ("max_bytes", max_bytes)):
            if limit is not None:
                _check_index(name, limit)
        body = await self._ask(
            topic, lambda number: bulk.offset_for(number, topic, incarnation, start, max_messages, max_bytes)
        )
        return int(body.index)

    async def index_at_time(self, topic: str, incarnation: str, timestamp_ms: int) -> int:
        """Index of the first message that a broker appended at this time or later; the end if there is none, which may be
        beyond what is stable."""
        _check_index("timestamp_ms", timestamp_ms)
        body = await self._ask(topic, lambda number: bulk.index_at_time(number, topic, incarnation, timestamp_ms))
        return int(body.index)

    async def fetch(self, topic: str, incarnation: str, start: int, stop: int, *, max_bytes: int) -> Fetched:
        """Whole entries that overlap `[start, stop)`, from its beginning on, as many as fit into `max_bytes` and what a broker
        gives at once, at least one. Waits until all of the range is stable. Raises DataLost, IncarnationMismatch, and NotReady
        after the operation's deadline."""
        _check_index("start", start)
        _check_index("stop", stop)
        if stop < start:
            raise InvalidArgument(f"The range {start} to {stop} of {topic} ends before it begins.")
        _check_index("max_bytes", max_bytes)
        answer = await self._ask(
            topic,
            lambda number: bulk.fetch_entries(number, topic, incarnation, start, stop, min(max(max_bytes, 1), MAX_FETCH)),
        )
        if not isinstance(answer, Bulk) or answer.data is None:
            raise ProtocolError(f"The broker answered a bulk read of {topic} without any payload; it is broken.")
        body = answer.body
        bulk.check_fetched(body, answer.data)
        return Fetched(
            body.covered_to,
            list(body.last_index),
            list(body.ledger_id),
            list(body.entry_id),
            list(body.append_time),
            list(body.size),
            memoryview(answer.data),
        )

    async def move_cursor(self, topic: str, incarnation: str, subscription: str, index: int) -> None:
        """Note that everything below `index` is read, durably, in a subscription that is made if there is none, at the
        beginning of the topic. It never goes back."""
        _check_index("index", index)
        await self._ask(topic, lambda number: bulk.move_cursor(number, topic, incarnation, subscription, index))

    # Inside.

    async def _ask(self, topic: str, build: Callable[[int], bytes]) -> Any:
        async def ask() -> Any:
            connection = await self._owner(topic)
            try:
                return await connection.request(build, seconds=self._patience)
            except PASSING:
                self._owners.pop(topic, None)
                raise

        try:
            return await self._retry(ask, topic)
        except (IncarnationMismatch, TopicNotFound):
            self._logs.clear()  # other partitions may be new ones as well
            raise

    async def _describe(self, topics: Iterable[str]) -> dict[str, SegmentState]:
        """By name; those that are gone are left out, those that are on the move are asked for again."""
        found: dict[str, SegmentState] = {}
        waiting = dict.fromkeys(topics)

        async def ask() -> None:
            failures: list[BraidError] = []
            groups = await self._by_owner(waiting, failures)
            chunks = [
                (connection, group[at : at + DESCRIBED_AT_ONCE])
                for connection, group in groups
                for at in range(0, len(group), DESCRIBED_AT_ONCE)
            ]

            async def one(connection: Connection, chunk: list[str]) -> None:
                try:
                    body = await connection.request(
                        lambda number: bulk.describe_segments(number, chunk), seconds=self._patience
                    )
                except PASSING as error:
                    self._moved(chunk)
                    failures.append(error)
                    return
                for each in body.segments:
                    if each.HasField("error"):
                        refusal = from_code(each.error, each.message)
                        self._moved([each.topic])
                        if isinstance(refusal, TopicNotFound):
                            waiting.pop(each.topic, None)
                        else:
                            failures.append(refusal)
                        continue
                    waiting.pop(each.topic, None)
                    found[each.topic] = SegmentState(
                        each.topic,
                        each.incarnation,
                        each.low_index,
                        each.stable_index,
                        each.end_index,
                        each.is_sealed,
                        each.stored_bytes,
                    )

            await asyncio.gather(*[one(*chunk) for chunk in chunks])
            if waiting:
                lasting = [each for each in failures if not isinstance(each, PASSING)]
                raise (lasting or failures or [NotReady(f"A broker did not tell of {next(iter(waiting))}.")])[0]

        await self._retry(ask, f"the indexes of {len(waiting)} topics")
        return found

    async def _by_owner(self, topics: Iterable[str], failures: list[BraidError]) -> list[tuple[Connection, list[str]]]:
        groups: dict[int, tuple[Connection, list[str]]] = {}
        names = iter(list(topics))

        async def work() -> None:
            for topic in names:
                try:
                    connection = await self._owner(topic)
                except BraidError as error:
                    failures.append(error)
                else:
                    groups.setdefault(id(connection), (connection, []))[1].append(topic)

        await asyncio.gather(*[work() for _ in range(LOOKUPS_AT_ONCE)])
        return list(groups.values())

    async def _owner(self, topic: str) -> Connection:
        known = self._owners.get(topic)
        if known is None or not known.is_open:
            known = await self._client.locate(topic)
            if len(self._owners) >= MAX_OWNERS:
                self._owners.clear()  # segments come and go; those in use are looked up again
            self._owners[topic] = known
        return known

    def _moved(self, topics: Iterable[str]) -> None:
        for topic in topics:
            self._owners.pop(topic, None)

    async def _retry(self, ask: Callable[[], Awaitable[T]], what: str) -> T:
        """What passes is tried again until the operation's deadline, and raised then."""
        deadline = self._clock.monotonic() + self._config.operation_timeout
        pause = self._config.backoff_initial
        while True:
            self._client.keep(self)  # raises Closed
            try:
                return await ask()
            except PASSING as error:
                if self._clock.monotonic() + pause >= deadline:
                    raise
                log.info("%s: trying again: %s", what, error)
            await self._clock.sleep(pause * (0.5 + self._client.runtime.random.random()))
            pause = min(pause * 2, self._config.backoff_max, MAX_PAUSE)


def _view(topic: str, resolved: TopicName, layout: SegmentLayout, incarnation: str) -> TopicView:
    segments = {
        number: SegmentView(
            number,
            str(physical_name(resolved, each)),
            each.hash_range.start,
            each.hash_range.end,
            each.parent_ids,
            each.child_ids,
            each.is_sealed,
        )
        for number, each in sorted(layout.all_segments.items())
    }
    return TopicView(topic, incarnation, layout.next_segment_id, layout.epoch, segments)


def _check_index(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_INDEX:
        raise InvalidArgument(f"{name}={value!r:.100} cannot be used; give a whole number, 0 or more.")
