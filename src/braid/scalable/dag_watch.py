"""`DagWatchSession`: a client that is told the layout of a topic, now and after every change (commands 70-72).

Owns one feed per topic, however many sessions look at it: it watches the topic's record and its controller's, reads them fresh
when a watch says so and every `reconcile_seconds` besides (INV15), and pushes what changed. Pushes of a session are in order
and never go back to a lower epoch (L-19); a topic that is deleted, or deleted and made anew, ends its sessions with
TopicNotFound (L-21). Any broker serves sessions, from the store alone (R468-1). Who may lead or own is not decided here: the
addresses are hints.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec

from braid.errors import BraidError, Closed, InvariantBroken, NotAllowed, NotReady, StoreError, TopicNotFound
from braid.metadata.api import MetadataStore, Record
from braid.model.layout import SegmentLayout
from braid.model.names import Domain, TopicName
from braid.model.routing import Routing
from braid.model.segments import physical_name
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.config import ScalableConfig
from braid.scalable.records import REGULAR, ScalableTopicMetadata, controller_path, decode, topic_path

log = logging.getLogger(__name__)
RETRY_SECONDS: Final = 0.5
PATIENCE_SECONDS: Final = 1.0
"""How long a first update waits for addresses: of owners, and of a controller that is being elected."""
NEWS_SECONDS: Final = 0.05
"""How long a later update waits for the addresses of new segments."""
CONCURRENT: Final = 16
"""Owners asked for at the same time."""


class DagUpdate(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """What a session is told."""

    layout: SegmentLayout
    incarnation: str
    """Of a scalable topic; empty for a regular one."""
    segment_brokers: Mapping[int, str]
    """Addresses of the owners of active segments, as far as they are known."""
    controller_url: str | None
    resolved_topic_name: str

    @property
    def is_synthetic(self) -> bool:
        """The layout of a regular topic."""
        return self.layout.routing is Routing.MOD_N


Push = Callable[[DagUpdate | BraidError], None]
"""Called in order, never after `close`; an error is the last thing a session hears."""
Address = Callable[[TopicName], Awaitable[str | None]]


class DagWatchSession:
    """One session of one client."""

    __slots__ = ("_feed", "_incarnation", "_push", "_shown", "session_id", "topic")

    def __init__(self, session_id: int, topic: TopicName, push: Push, feed: _Feed) -> None:
        self.session_id = session_id
        self.topic = topic
        self._push = push
        self._feed: _Feed | None = feed
        self._shown = -1
        self._incarnation: str | None = None

    @property
    def is_open(self) -> bool:
        return self._feed is not None

    def show(self, update: DagUpdate) -> None:
        """Push, unless it is older than what the client has; end if the topic is not the same any more."""
        if self._incarnation and self._incarnation != update.incarnation:
            self.end(TopicNotFound(f"{self.topic} was deleted and made anew; look it up again."))
        elif self._feed is not None and update.layout.epoch >= self._shown:
            self._shown = update.layout.epoch
            self._incarnation = update.incarnation
            self._push(update)

    def end(self, error: BraidError) -> None:
        """Tell why, and close."""
        if self._feed is not None:
            self._push(error)
            self.close()

    def close(self) -> None:
        """Hear nothing any more. Idempotent."""
        feed, self._feed = self._feed, None
        if feed is not None:
            feed.leave(self)


class DagWatches:
    """All sessions of one broker."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        *,
        owner_url: Address,
        broker_url: Callable[[str], Awaitable[str | None]],
        ensure_controller: Callable[[TopicName], Awaitable[object]],
        partitions: Callable[[TopicName], Awaitable[int | None]],
    ) -> None:
        """`owner_url` of a topic, `broker_url` of a broker id; `ensure_controller` makes this broker a candidate for the
        leadership of a topic; `partitions` of a regular topic: their number, 0 if it has none, None if there is no topic."""
        self.clock = runtime.clock
        self.store = store
        self.config = config
        self.owner_url = owner_url
        self.broker_url = broker_url
        self.ensure_controller = ensure_controller
        self.partitions = partitions
        self.feeds: dict[TopicName, _Feed] = {}
        self._is_closed = False

    @property
    def session_count(self) -> int:
        return sum(len(feed.sessions) for feed in self.feeds.values())

    async def open(
        self, session_id: int, topic: TopicName, push: Push, *, create: Callable[[], Awaitable[object]] | None = None
    ) -> DagWatchSession:
        """Start a session; its first update was pushed when this returns. `create` makes a missing `topic://` topic.

        Raises TopicNotFound, NotAllowed, StoreError and what `create` raises; then there is no session."""
        _check(topic)
        if self._is_closed:
            raise Closed("The broker is shutting down.")
        feed = self.feeds.get(topic)
        if feed is None:
            feed = self.feeds[topic] = _Feed(self, topic)
        feed.arriving += 1
        try:
            try:
                update = await feed.look()
            except TopicNotFound:
                if create is None or topic.domain is not Domain.TOPIC:
                    raise
                await create()
                update = await feed.look()
            session = DagWatchSession(session_id, topic, push, feed)
            feed.sessions[session] = None
            try:
                session.show(update)
            except BaseException:
                session.close()
                raise
            return session
        finally:
            feed.arriving -= 1
            feed.end_if_unused()

    async def close(self) -> None:
        """End all sessions without a word."""
        self._is_closed = True
        for feed in list(self.feeds.values()):
            await feed.close()

    def kill(self) -> None:
        self._is_closed = True
        for feed in list(self.feeds.values()):
            feed.stop()


class _Feed:
    """One topic."""

    def __init__(self, watches: DagWatches, topic: TopicName) -> None:
        self.topic = topic
        self.sessions: dict[DagWatchSession, None] = {}
        self.arriving = 0
        self._all = watches
        self._clock = watches.clock
        self._store = watches.store
        self._update: DagUpdate | None = None
        self._basis: tuple[object, ...] | None = None  # what the update was made from
        self._made_at = 0.0
        self._news = asyncio.Event()
        self._turn = asyncio.Lock()
        self._campaign: asyncio.Task[None] | None = None
        self._tasks = Tasks(f"layout of {topic}")
        self._tasks.spawn(self._run(), "run")
        self._tasks.spawn(self._listen(topic_path(topic)), "listen")
        self._tasks.spawn(self._listen(controller_path(topic)), "listen to the controller")
        if topic.domain is Domain.PERSISTENT:
            self._tasks.spawn(self._listen(controller_path(topic, REGULAR)), "listen to the regular controller")

    def leave(self, session: DagWatchSession) -> None:
        self.sessions.pop(session, None)
        self.end_if_unused()

    def end_if_unused(self) -> None:
        if not self.sessions and not self.arriving:
            self.stop()

    def stop(self) -> None:
        if self._all.feeds.get(self.topic) is self:
            del self._all.feeds[self.topic]
        self._tasks.cancel()

    async def close(self) -> None:
        self.stop()
        await self._tasks.close()

    async def look(self) -> DagUpdate:
        """Read everything fresh, tell the sessions if it changed, return it. Raises TopicNotFound after telling, StoreError."""
        async with self._turn:
            record = await self._store.get(topic_path(self.topic), fresh=True)
            metadata = None if record is None else decode(ScalableTopicMetadata, record.key, record.value)
            if metadata is None and self.topic.domain is Domain.PERSISTENT and not self._is_real():
                basis, layout = await self._regular()
                root = controller_path(self.topic, REGULAR)
            elif metadata is None or metadata.is_deleting:
                error = TopicNotFound(f"The topic {self.topic.scalable} does not exist.")
                self._update = self._basis = None
                self._tell(lambda session: session.end(error))
                raise error
            else:
                basis, layout = (metadata.incarnation, metadata.epoch), metadata.layout
                root = controller_path(self.topic)
                await self._ensure_controller(root)
            leader = await self._store.get(root, fresh=True)
            basis += (leader.version if leader else None,)
            if self._update is not None and basis == self._basis and not self._is_old():
                return self._update
            update = await self._make(layout, metadata.incarnation if metadata is not None else "", leader)
            is_new = basis != self._basis
            self._update, self._basis, self._made_at = update, basis, self._clock.monotonic()
            if is_new:
                self._tell(lambda session: session.show(update))
            return update

    def _tell(self, told: Callable[[DagWatchSession], None]) -> None:
        """Tell all sessions. One that cannot be told ends, and is nobody else's concern."""
        for session in tuple(self.sessions):
            try:
                told(session)
            except Exception:
                log.exception("a session could not be told the layout of %s; it ends", self.topic)
                with suppress(Exception):
                    session.end(NotReady(f"The layout of {self.topic} could not be told; look it up again."))
                session.close()

    def _is_real(self) -> bool:
        """Whether the sessions were shown a scalable topic."""
        return self._update is not None and not self._update.is_synthetic

    def _is_old(self) -> bool:
        """Addresses of owners change without a word; a new session gets fairly fresh ones."""
        return self.arriving > 0 and self._clock.monotonic() - self._made_at > self._all.config.reconcile_seconds

    async def _regular(self) -> tuple[tuple[object, ...], SegmentLayout]:
        count = await self._all.partitions(self.topic)
        names = [str(self.topic.partition(number)) for number in range(count)] if count else [str(self.topic)]
        return ("partitions", len(names), bool(count)), SegmentLayout.synthetic(names)

    async def _make(self, layout: SegmentLayout, incarnation: str, leader: Record | None) -> DagUpdate:
        owners: dict[int, str] = {}
        patience = PATIENCE_SECONDS
        if self._update is not None and not self.arriving:  # producers wait for the news, so do with what is known
            owners = {number: url for number, url in self._update.segment_brokers.items() if number in layout.active_segments}
            patience = NEWS_SECONDS
        if layout.routing is not Routing.MOD_N:
            await self._patiently(self._find_owners(layout, owners), "owners", patience)
        urls: list[str] = []
        if leader is not None:
            await self._patiently(self._find_leader(leader, urls), "leader", PATIENCE_SECONDS)
        return DagUpdate(
            layout=layout,
            incarnation=incarnation,
            segment_brokers=dict(owners),
            controller_url=urls[0] if urls else None,
            resolved_topic_name=str(self.topic.scalable),
        )

    async def _find_owners(self, layout: SegmentLayout, found: dict[int, str]) -> None:
        turns = asyncio.Semaphore(CONCURRENT)

        async def find(number: int, name: TopicName) -> None:
            async with turns:
                try:
                    url = await self._all.owner_url(name)
                except BraidError as error:
                    log.debug("the owner of %s is unknown: %s", name, error)
                    return
            if url is not None:
                found[number] = url

        async with asyncio.TaskGroup() as group:
            for number, segment in layout.active_segments.items():
                if number not in found:
                    group.create_task(find(number, physical_name(self.topic, segment)))

    async def _find_leader(self, leader: Record, found: list[str]) -> None:
        try:
            url = await self._all.broker_url(msgspec.json.decode(leader.value, type=str))
        except (BraidError, msgspec.MsgspecError, ValueError) as error:
            log.info("the address of the leader of %s is unknown: %s", self.topic, error)
            return
        if url is not None:
            found.append(url)

    async def _ensure_controller(self, key: str) -> None:
        """If nobody leads the topic, be a candidate; wait a little for the outcome."""
        if await self._store.get(key) is not None:
            return
        if self._campaign is None or self._campaign.done():
            self._campaign = self._tasks.spawn(self._run_for_office(), "campaign")
            await self._wait(self._campaign, PATIENCE_SECONDS)

    async def _run_for_office(self) -> None:
        try:
            await self._all.ensure_controller(self.topic.scalable)
        except BraidError as error:
            log.info("this broker is no candidate for %s yet: %s", self.topic, error)

    async def _patiently(self, work: Coroutine[Any, Any, None], what: str, seconds: float) -> None:
        task = self._tasks.spawn(work, what)
        await self._wait(task, seconds)
        task.cancel()

    async def _wait(self, task: asyncio.Task[None], seconds: float) -> None:
        """Until the task is done or patience ends."""
        ended = asyncio.Event()
        task.add_done_callback(lambda _task: ended.set())
        timer = self._clock.call_later(seconds, ended.set)
        try:
            await ended.wait()
        finally:
            timer.cancel()

    async def _run(self) -> None:
        """Look when there is news, and every now and then without."""
        usual = pause = self._all.config.reconcile_seconds
        while True:
            timer = self._clock.call_later(pause, self._news.set)  # one at a time, or failures would make ever more of them
            try:
                await self._news.wait()
            finally:
                timer.cancel()
            self._news.clear()
            pause = usual
            try:
                await self.look()
            except TopicNotFound:
                pass  # the sessions were told; one that is about to create the topic looks again itself
            except StoreError as error:
                log.info("the layout of %s could not be read: %s", self.topic, error)
                pause = min(RETRY_SECONDS, usual)
            except Closed:
                return
            except InvariantBroken:
                raise
            except Exception:  # or the sessions would never hear of anything again
                log.exception("the layout of %s could not be looked at and is looked at again", self.topic)

    async def _listen(self, key: str) -> None:
        while True:
            try:
                async with self._store.watch(key) as events:
                    async for _event in events:
                        self._news.set()
            except StoreError as error:
                log.info("the watch on %s ended and is set up again: %s", key, error)
            except Closed:
                return
            await self._clock.sleep(RETRY_SECONDS)
            self._news.set()


def _check(topic: TopicName) -> None:
    if topic.domain in (Domain.NON_PERSISTENT, Domain.SEGMENT):
        raise NotAllowed(f"{topic} has no layout: look up a topic:// or persistent:// name.")
    if topic.domain is Domain.PERSISTENT and topic.is_partition:
        raise TopicNotFound(f"{topic} is one partition and has no layout of its own; look up {topic.base}.")
