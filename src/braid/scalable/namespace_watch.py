"""`NamespaceWatchSession`: a client that is told which scalable topics a namespace has, now and later (commands 76-78).

Owns one feed per namespace, however many sessions look at it: it folds a watch on the namespace's records and compares with a
fresh scan every `reconcile_seconds` (INV15). A session sees the topics that have all its properties: first a snapshot, unless
it knows the set already, then differences, collected for a moment so that a burst is one message. Decides nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final

import msgspec

from braid.errors import BraidError, Closed, InvariantBroken, NotReady, StoreError
from braid.metadata.api import Delete, Event, MetadataStore, Put, Record, Span
from braid.model.names import NamespaceName
from braid.runtime.clock import Timer
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.config import ScalableConfig
from braid.scalable.records import ScalableTopicMetadata, decode, namespace_path, topic_of
from braid.wire.checksum import topics_hash

log = logging.getLogger(__name__)
COLLECT_SECONDS: Final = 0.05
"""Changes that come within this time are told together."""
RETRY_SECONDS: Final = 0.5


class NamespaceSnapshot(msgspec.Struct, frozen=True):
    """All topics of the session, in order."""

    topics: tuple[str, ...]


class NamespaceDiff(msgspec.Struct, frozen=True):
    """What changed; `removed` is to be applied first."""

    added: tuple[str, ...]
    removed: tuple[str, ...]


Push = Callable[[NamespaceSnapshot | NamespaceDiff | BraidError], None]


class NamespaceWatchSession:
    """One watch of one client."""

    __slots__ = ("_feed", "_filters", "_known", "_push", "watch_id")

    def __init__(self, watch_id: int, filters: Mapping[str, str], push: Push, feed: _Feed) -> None:
        self.watch_id = watch_id
        self._filters = dict(filters)
        self._push = push
        self._feed: _Feed | None = feed
        self._known: set[str] = set()

    def begin(self, topics: Mapping[str, Mapping[str, str]], current_hash: str | None) -> None:
        """The first thing it hears, unless it knows it."""
        self._known = self._wanted(topics)
        if current_hash is None or current_hash != topics_hash(self._known):
            self._push(NamespaceSnapshot(tuple(sorted(self._known))))

    def compare(self, topics: Mapping[str, Mapping[str, str]]) -> None:
        """Tell what changed since it was told last."""
        wanted, known = self._wanted(topics), self._known
        if self._feed is not None and wanted != known:
            self._known = wanted
            self._push(NamespaceDiff(tuple(sorted(wanted - known)), tuple(sorted(known - wanted))))

    def fail(self, error: BraidError) -> None:
        """Tell why, as far as that is possible, and close."""
        with suppress(Exception):
            self._push(error)
        self.close()

    def close(self) -> None:
        """Hear nothing any more. Idempotent."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.leave(self)

    def _wanted(self, topics: Mapping[str, Mapping[str, str]]) -> set[str]:
        return {name for name, properties in topics.items() if self._filters.items() <= properties.items()}


class NamespaceWatches:
    """All namespace watches of one broker."""

    def __init__(self, runtime: Runtime, store: MetadataStore, config: ScalableConfig) -> None:
        self.clock = runtime.clock
        self.store = store
        self.config = config
        self.feeds: dict[NamespaceName, _Feed] = {}
        self._is_closed = False

    @property
    def session_count(self) -> int:
        return sum(len(feed.sessions) for feed in self.feeds.values())

    async def open(
        self,
        watch_id: int,
        namespace: NamespaceName,
        push: Push,
        *,
        filters: Mapping[str, str] | None = None,
        current_hash: str | None = None,
    ) -> NamespaceWatchSession:
        """Start a watch; its snapshot was pushed when this returns, unless `current_hash` shows that it is known. Raises
        StoreError; then there is no watch."""
        if self._is_closed:
            raise Closed("The broker is shutting down.")
        feed = self.feeds.get(namespace)
        if feed is None:
            feed = self.feeds[namespace] = _Feed(self, namespace)
        feed.arriving += 1
        try:
            await feed.load()
            session = NamespaceWatchSession(watch_id, filters or {}, push, feed)
            feed.sessions[session] = None
            try:
                session.begin(feed.topics, current_hash)
            except BaseException:
                session.close()
                raise
            return session
        finally:
            feed.arriving -= 1
            feed.end_if_unused()

    async def close(self) -> None:
        """End all of them without a word."""
        self._is_closed = True
        for feed in list(self.feeds.values()):
            await feed.close()

    def kill(self) -> None:
        self._is_closed = True
        for feed in list(self.feeds.values()):
            feed.stop()


class _Feed:
    """One namespace."""

    def __init__(self, watches: NamespaceWatches, namespace: NamespaceName) -> None:
        self.topics: dict[str, Mapping[str, str]] = {}
        """Properties by topic."""
        self.sessions: dict[NamespaceWatchSession, None] = {}
        self.arriving = 0
        self._all = watches
        self._clock = watches.clock
        self._namespace = namespace
        self._span = Span(namespace_path(namespace))
        self._collecting: Timer | None = None
        self._meanwhile: list[Event] | None = None  # what the watch said during a scan
        self._turn = asyncio.Lock()
        self._tasks = Tasks(f"topics of {namespace}")
        self._tasks.spawn(self._reconcile(), "reconcile")
        self._tasks.spawn(self._follow(), "follow")

    def leave(self, session: NamespaceWatchSession) -> None:
        self.sessions.pop(session, None)
        self.end_if_unused()

    def end_if_unused(self) -> None:
        if not self.sessions and not self.arriving:
            self.stop()

    def stop(self) -> None:
        if self._all.feeds.get(self._namespace) is self:
            del self._all.feeds[self._namespace]
        if self._collecting is not None:
            self._collecting.cancel()
        self._tasks.cancel()

    async def close(self) -> None:
        self.stop()
        await self._tasks.close()

    async def load(self) -> None:
        """Compare with the store."""
        async with self._turn:
            found: dict[str, Mapping[str, str]] = {}
            self._meanwhile = []
            async for record in self._all.store.scan(self._span, fresh=True):
                self._put(found, record)
            for event in self._meanwhile:
                self._apply(found, event)
            self._meanwhile = None
            if found != self.topics:
                self.topics = found
                self._tell_soon()

    def _apply(self, topics: dict[str, Mapping[str, str]], event: Event) -> None:
        if isinstance(event, Put):
            self._put(topics, event.record)
        elif isinstance(event, Delete):
            topics.pop(str(topic_of(event.key)), None)

    def _put(self, topics: dict[str, Mapping[str, str]], record: Record) -> None:
        name = str(topic_of(record.key))
        try:
            metadata = decode(ScalableTopicMetadata, record.key, record.value)
        except StoreError as error:
            log.warning("what is known of the topic %s stays as it is: %s", name, error)
            if (known := self.topics.get(name)) is not None:
                topics[name] = known
            else:
                topics.pop(name, None)
            return
        if metadata.is_deleting:
            topics.pop(name, None)
        else:
            topics[name] = metadata.properties

    def _tell_soon(self) -> None:
        if self._collecting is None:
            self._collecting = self._clock.call_later(COLLECT_SECONDS, self._tell)

    def _tell(self) -> None:
        self._collecting = None
        for session in tuple(self.sessions):
            try:
                session.compare(self.topics)
            except Exception:  # its own concern, not that of those who are told after it
                log.exception("a watch could not be told the topics of %s; it ends", self._namespace)
                session.fail(NotReady(f"The topics of {self._namespace} could not be told; watch them again."))

    async def _reconcile(self) -> None:
        while True:
            await self._clock.sleep(self._all.config.reconcile_seconds)
            try:
                await self.load()
            except StoreError as error:
                log.info("the topics of %s could not be listed: %s", self._namespace, error)
            except Closed:
                return
            except InvariantBroken:
                raise
            except Exception:  # or what no watch tells would never be known
                log.exception("the topics of %s could not be listed and are listed again", self._namespace)

    async def _follow(self) -> None:
        while True:
            try:
                async with self._all.store.watch(self._span) as events:
                    async for event in events:
                        self._apply(self.topics, event)
                        if self._meanwhile is not None:
                            self._meanwhile.append(event)
                        self._tell_soon()
            except StoreError as error:
                log.info("the watch on the topics of %s ended and is set up again: %s", self._namespace, error)
            except Closed:
                return
            await self._clock.sleep(RETRY_SECONDS)
