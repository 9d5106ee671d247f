"""`SubscriptionCoordinator`: who reads which segments of one stream or checkpoint subscription.

Owns the assignment, in the memory of the topic's leader, and which connection of a consumer counts; who is registered, and
until when, is kept by `members.py`. Assigns a segment only after all its ancestors are drained (INV8), each segment to one
consumer, moving as little as balance allows (decision 3); writes an assignment down before it tells it, and tells only those
whose assignment changed (R468-28). Liveness is never written. A new leader goes on from the records: an assigned segment
proves that its ancestors were drained, so the barrier holds from the first moment and nothing moves needlessly (L-09,
R468-67). Every act asks the leadership first (INV4).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, ParamSpec

import msgspec

from braid.errors import (
    BraidError,
    Closed,
    ConsumerBusy,
    ConsumerDisplaced,
    ConsumerNotFound,
    InvalidArgument,
    InvariantBroken,
    NotReady,
    PreconditionFailed,
    StoreError,
    invariant,
)
from braid.metadata.api import MetadataStore
from braid.metadata.claims import GuardedRecord, StaleLeader
from braid.metadata.election import Leadership
from braid.model.assignment import assign, assignable, in_order
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.api import (
    AssignedSegment,
    BlockedBy,
    ConsumerAssignment,
    ConsumerHandle,
    ConsumerRegistration,
    LogOf,
    PlaceReport,
    RegistrationNumber,
    SegmentOps,
)
from braid.scalable.config import ScalableConfig
from braid.scalable.departures import Departures, until_released
from braid.scalable.draining import DrainWatch
from braid.scalable.handover import GroupPlaces, check_places
from braid.scalable.members import Members
from braid.scalable.records import TOPICS, RegistrationRecord, SubscriptionMetadata, subscription_path
from braid.scalable.sessions import ConsumerSession, Registrations, present
from braid.scalable.subscription_state import SubscriptionState, away, draining, shown_state, unreadable

log = logging.getLogger(__name__)
P = ParamSpec("P")
MAX_CONSUMER_NAME: Final = 1024
"""Characters."""
LAST_WRITE_SECONDS: Final = 10.0
"""How long the end of a subscription waits for a registration that is being written; a later one is told by its mark."""


class SubscriptionCoordinator:
    """One subscription at the leader. Make it, `restore` it, then use it; `close` or `kill` it with the leadership."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        leadership: Leadership,
        topic: TopicName,
        name: str,
        record: SubscriptionMetadata,
        layout: SegmentLayout,
        *,
        root: str = TOPICS,
        incarnation: str = "",
        log_of: LogOf | None = None,
    ) -> None:
        """`incarnation` is the topic's; a regular one has none, but its logs have (`log_of`)."""
        self.topic = topic
        self.name = name
        self.record = record
        self._clock = runtime.clock
        self._config = config
        self._segments = segments
        self._leadership = leadership
        self._layout = layout
        self._registrations = Registrations(store, leadership, topic, name, root, mark=record.mark(incarnation))
        self._arriving: dict[int, bool] = {}  # identity of a handle under registration -> its connection was lost meanwhile
        self._before: dict[str, tuple[int, ...]] | None = None  # the assignment a revocation took away
        self._reset_ms = 0
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._members = Members(
            self._clock, self._registrations, name, grace_seconds=config.consumer_grace_seconds, changed=self._news.set
        )
        self._sessions = self._members.sessions
        key = subscription_path(topic, name, root)
        self._places: GroupPlaces | None = None
        if not self.has_barrier:
            guarded = GuardedRecord(store, leadership, key, SubscriptionMetadata)
            # Somebody who is away has at least its grace period to come back and say it.
            patience = max(config.handover_seconds, config.consumer_grace_seconds)
            self._places = GroupPlaces(
                self._clock, guarded, record, topic, patience_seconds=patience, changed=self._news.set, log_of=log_of
            )
        self._is_restored = False
        self.is_closed = False
        self._tasks = Tasks(f"subscription {topic} {name}")
        self.drains = DrainWatch(
            self._clock,
            segments,
            topic,
            name,
            record,
            layout,
            epoch=leadership.epoch,
            incarnation=incarnation,
            poll_seconds=config.drain_poll_seconds,
            is_wanted=lambda: bool(self._sessions),
            changed=self._news.set,
        )

    @property
    def has_barrier(self) -> bool:
        """Checkpoint consumers have no cursors, so nothing ever drains for them."""
        return self.record.type != "CHECKPOINT"

    @property
    def is_empty_group(self) -> bool:
        """Whether this is a checkpoint group without members."""
        return self._places is not None and not self._sessions and not self._arriving

    @property
    def is_revoked(self) -> bool:
        """Between `revoke` and `resume`."""
        return self._before is not None

    # Life.

    async def restore(self) -> None:
        """Take over what the records say: everyone disconnected, with a fresh grace period, and the assignment as it was.

        Claims each registration by writing when it was first found absent. Raises StaleLeader, StoreError; may be repeated."""
        async with self._turn:
            if self._is_restored:
                return
            now = self._clock.now_ms()
            claimed = await self._members.claim(now)
            self._check_alive()
            self._members.take_over(claimed, now)
            if self.record.is_resetting:  # what was assigned proves nothing any more, and nobody gets anything before `resume`
                self._before = {name: each.segments for name, each in self._sessions.items()}
                for session in self._sessions.values():
                    session.give(())
            # Nobody is given a segment before its ancestors are drained, so what is assigned proves that they are.
            read = {number for each in self._sessions.values() for number in each.segments}
            self.drains.know(above for number in read for above in self._layout.ancestors(number))
            readable = {each.segment_id for each in self._readable()}
            for session in self._sessions.values():
                session.give(tuple(number for number in session.segments if number in readable))
            self._is_restored = True
            self._tasks.spawn(self._work(), "work")
            if self.has_barrier:
                self._tasks.spawn(self.drains.run(), "drains")
                self._tasks.spawn(self._departures().run(), "departures")
        if self._sessions:
            self._tasks.spawn(self._first_look(), "first look")

    async def close(self, error: BraidError | None = None) -> None:
        """End; nothing is written any more when it returns. Connected consumers are told `error`, by default that they have to
        find the leader; given for a subscription that goes for good: its registrations are about to be removed."""
        handles = [(name, each.handle) for name, each in self._sessions.items() if each.handle is not None]
        is_first = not self.is_closed
        self.kill()
        await self._tasks.close()
        if error is not None:
            await self._until_written()
        if is_first:
            reason = error or NotReady(
                f"Subscription {self.name} of {self.topic} is no longer coordinated here; register again."
            )
            for name, handle in handles:
                self._tell(name, handle.ended, reason)

    async def _until_written(self) -> None:
        """Wait for the registration that is just being written, if there is one, but not for ever."""
        ending = Tasks(f"end of subscription {self.topic} {self.name}")
        waiting = ending.spawn(self._turn.acquire(), "last write")
        patience = self._clock.call_later(LAST_WRITE_SECONDS, waiting.cancel)
        try:
            await asyncio.wait([waiting])
        finally:
            patience.cancel()
            await ending.close()
            if not waiting.cancelled():
                self._turn.release()

    def kill(self) -> None:
        """End at once, as a crash would."""
        self.is_closed = True
        self._members.stop()
        if self._places is not None:
            self._places.stop()
        self._tasks.cancel()

    # Consumers.

    async def register(self, registration: ConsumerRegistration) -> ConsumerAssignment:
        """A consumer is here: its assignment. A known name resumes its session and disturbs nobody; the newest connection of a
        name wins, also if an older one is registered again later because the leader changed. Raises ConsumerDisplaced in that
        case, InvalidArgument for an impossible name, ConsumerBusy if there are too many, StaleLeader, StoreError, Closed."""
        name, key = registration.consumer_name, id(registration.handle)
        _check_name(name)
        await self.restore()
        self._arriving[key] = False
        try:
            if name not in self._sessions and self.has_barrier:
                await self.drains.look_now()  # so that it is not given what others have long read
            async with self._act():
                self._registrations.check_leading()
                session = self._sessions.get(name)
                if session is not None and session.is_newer_than(registration.number):
                    raise ConsumerDisplaced(f"A newer connection has the name {name} in subscription {self.name} by now.")
                if self._places is not None:
                    await self._places.is_used(self._clock.now_ms(), self._config.group_grace_seconds, self._layout)
                if session is None:
                    session = await self._join(name)
                elif session.absent_since_ms is not None:
                    await self._registrations.save(name, present)
                    session.absent_since_ms = None
                if self._places is not None:
                    await self._members.write(self._layout.epoch, losses_first=True)  # or two could be told the same
                self._check_alive()
                if self._arriving[key]:
                    raise Closed(f"The connection of consumer {name} was lost while it registered.")
                displaced = session.attach(registration, number := registration.number or self._next_number())
                if displaced is not None:
                    self._tell(name, displaced.displaced)
                if self._places is not None:
                    self._news.set()  # it may owe nothing any more
                return msgspec.structs.replace(self._assignment(session), number=number)
        finally:
            del self._arriving[key]

    async def unregister(self, consumer_name: str, handle: ConsumerHandle) -> None:
        """A consumer leaves for good: its segments are free at once. Ignored if the name has another connection by now."""
        if id(handle) in self._arriving:
            self._arriving[id(handle)] = True
        async with self._act():
            session = self._sessions.get(consumer_name)
            if session is None or session.handle is not handle:
                return
            await self._let_go(session)

    async def forget(self, consumer_name: str, number: RegistrationNumber) -> None:
        """A consumer that registered with an earlier leader was closed by its client since: its segments are free at once.
        Ignored if a newer connection has the name."""
        async with self._act():
            session = self._sessions.get(consumer_name)
            if session is None or session.is_newer_than(number):
                return
            await self._let_go(session)

    async def remove(self, consumer_name: str) -> None:
        """An administrator removes a registration that nobody uses, its record readable or not: its segments are free at once.
        Raises ConsumerNotFound, PreconditionFailed if the consumer is connected, StaleLeader, StoreError."""
        async with self._act():
            session = self._sessions.get(consumer_name)
            if session is not None and session.is_connected:
                raise PreconditionFailed(
                    f"The consumer {consumer_name} of subscription {self.name} is connected; it leaves when it is closed."
                )
            if session is None and not await self._registrations.has(consumer_name):
                raise ConsumerNotFound(f"Subscription {self.name} of {self.topic} has no consumer {consumer_name}.")
            if session is not None:
                await self._let_go(session)
            else:
                await self._registrations.remove(consumer_name)

    async def _let_go(self, session: ConsumerSession) -> None:
        self._registrations.check_leading()
        self._members.drop(session)
        await self._members.remove_leftovers()
        await self._rebalance()

    async def report(self, consumer_name: str, handle: ConsumerHandle, report: PlaceReport) -> None:
        """A member of a checkpoint group says where it stands; what it has handed over goes to its next member. Ignored where
        it holds nothing. Raises NotReady if it has been told something else since: it is to look, and to say it again."""
        check_places(report.places)
        async with self._act():
            self._registrations.check_leading()
            session = self._sessions.get(consumer_name)
            if self._places is None or session is None or session.handle is not handle or report.term != self._leadership.epoch:
                raise NotReady(f"{consumer_name} has to register with {self.name} of {self.topic} first.")
            if await self._places.hear(session, report, self._layout):
                await self._rebalance()

    async def check_logs(self) -> None:
        """Take away what a checkpoint group reads at places that are in another log of the name (INV5); afterwards nobody is
        given such a place. Raises StaleLeader, StoreError, Closed."""
        if self._places is not None:
            async with self._act():
                if await self._places.check_logs(self._layout, self._sessions):
                    await self._rebalance()

    async def end_if_empty(self, grace_seconds: float) -> bool:
        """End a checkpoint group that has had no members for so long: True if it is closed and its record is to be removed."""
        if not self.is_empty_group or self.is_closed:  # closed: it was ended before, and its record could not be removed then
            return self.is_empty_group
        async with self._act():
            if self._places is None or not self.is_empty_group:
                return False
            now = self._clock.now_ms()
            since = await self._places.is_empty(min(self._members.idle_since_ms, now))
            if self._arriving or now - since < grace_seconds * 1000:
                return False
            self.kill()
        await self.close()
        return True

    def _next_number(self) -> RegistrationNumber:
        # Counted by the leadership: a coordinator that is made anew under it must not begin again below its predecessor.
        return self._leadership.epoch, self._leadership.next_number()

    def disconnected(self, consumer_name: str, handle: ConsumerHandle) -> None:
        """A connection was lost: the grace period begins, nothing else changes. Only the session's own connection counts."""
        if id(handle) in self._arriving:
            self._arriving[id(handle)] = True
        session = self._sessions.get(consumer_name)
        if session is None or session.handle is not handle or self.is_closed:
            return
        session.detach(self._clock.now_ms())
        self._members.start_grace(session)

    def on_layout_change(self, layout: SegmentLayout) -> None:
        """The topic has another layout: assign anew, soon."""
        if layout.epoch < self._layout.epoch or layout == self._layout:
            return
        renamed = _renamed(self._layout, layout)
        for session in self._sessions.values():
            if not renamed.isdisjoint(session.segments):  # taken away in memory, so that it is told the new names
                session.give(tuple(number for number in session.segments if number not in renamed))
            for number in renamed:
                session.owed.pop(number, None)
        if self._places is not None:
            self._places.forget(renamed)
        self._layout = layout
        self.drains.follow(layout)
        self._news.set()

    # Seek and clear-backlog.

    async def revoke(self) -> None:
        """Take every segment away from everyone and forget what is drained, before cursors are moved. Repeatable."""
        await self.restore()
        async with self._act():
            if self._before is None:
                self._before = {name: each.segments for name, each in self._sessions.items()}
            self.drains.forget()
            # Before any cursor moves no record may name a segment: the next leader would take its ancestors for drained.
            await self._members.remove_leftovers(must=True)
            await self._registrations.remove_unreadable()
            await self._rebalance(must_save=True)
            taken = {number for each in self._before.values() for number in each}
        if self.has_barrier:  # also of those whose registration is not connected: they may be attached nevertheless
            left = [item for number in taken if (item := self._layout.all_segments.get(number)) is not None]
            await until_released(self._clock, self._segments, self.topic, self.name, left)
        self.drains.forget()

    async def resume(self, record: SubscriptionMetadata) -> None:
        """Give the segments back, to those who had them as far as may be; `record` is the subscription's after the reset."""
        self.record = record
        self.drains.forget()
        self._reset_ms = self._clock.now_ms()
        if self.has_barrier and self._sessions:
            await self.drains.look_now()
        async with self._act():
            before, self._before = self._before or {}, None
            await self._rebalance(previous=before)

    # What statistics show.

    def state(self) -> SubscriptionState:
        """Now."""
        return shown_state(self.record.type, self._sessions, self._holding_up(), is_resetting=self._before is not None)

    def blocked_by(self) -> list[BlockedBy]:
        """Why it does not go on; empty if nothing holds it up (settled.md)."""
        passed_over = unreadable(self._registrations.unreadable, self._members.restored_ms)
        if not self._sessions:
            return [BlockedBy(kind="no-consumer", since=self._members.idle_since_ms), *passed_over]
        since = max(self.record.created_ms, self._reset_ms)
        waits = [draining(each, self._layout, self.drains.left, self._sessions, since) for each in self._holding_up()]
        return waits + away(self._sessions) + passed_over

    def _holding_up(self) -> list[SegmentInfo]:
        """Sealed segments that are not drained and have descendants that wait for them."""
        return in_order([each for each in self.drains.waiting if each.child_ids]) if self.has_barrier else []

    # Assignment. All of this runs under the turn.

    @asynccontextmanager
    async def _act(self) -> AsyncIterator[None]:
        """One act at a time. One that fails or is interrupted (its client went away) may leave the records or the other
        consumers behind what is in memory; `_work` sees to that."""
        async with self._turn:
            self._check_alive()
            try:
                yield
            except BaseException:
                self._news.set()
                raise

    def _readable(self) -> list[SegmentInfo]:
        return (
            assignable(self._layout, self.drains.drained) if self.has_barrier else in_order(self._layout.all_segments.values())
        )

    async def _rebalance(
        self,
        *,
        previous: dict[str, tuple[int, ...]] | None = None,
        must_save: bool = False,
    ) -> None:
        """Compute the assignment, write what changed, tell those it changed for, also if that was earlier."""
        self._registrations.check_leading()
        if self._places is not None:  # what is in the record of one who is gone may not be given: two records would have it
            await self._members.remove_leftovers(must=True)
        held = {name: each.segments for name, each in self._sessions.items()} if previous is None else previous
        segments = self._readable() if self._before is None else []
        wanted = assign(held, segments, self._sessions)
        if self._places is not None:
            wanted = self._places.restrained(wanted, self._sessions)
        dealt = [number for each in wanted.values() for number in each]
        invariant(len(dealt) == len(set(dealt)), "INV8", f"a segment of {self.topic} has two readers in {self.name}: {wanted}")
        changed = [each for name, each in self._sessions.items() if wanted[name] != each.segments]
        changed.sort(key=lambda each: bool(set(wanted[each.name]) - set(each.segments)))  # those who only lose come first
        for session in changed:
            session.give(wanted[session.name])
        try:
            await self._members.write(self._layout.epoch, losses_first=self._places is not None)
        except StaleLeader:
            raise
        except StoreError as error:
            if must_save or self._places is not None:  # members believe the records, or one segment has two readers
                raise
            log.warning("the assignment of %s on %s will be written later: %s", self.name, self.topic, error)
            self._members.try_again()
        if self._places is not None and await self._places.settle(self._sessions):
            self._news.set()  # they are given in the next round
        self._registrations.check_leading()
        late = [each for each in self._sessions.values() if each.is_untold and each not in changed]
        for session in (*late, *changed):
            if session.handle is not None and not self.is_closed:  # others are answered when they register
                session.is_untold = False
                self._tell(session.name, session.handle.push, self._assignment(session))

    def _assignment(self, session: ConsumerSession) -> ConsumerAssignment:
        places = self._places if session.hands_over else None
        known = [each for number in session.segments if (each := self._layout.all_segments.get(number)) is not None]
        return ConsumerAssignment(
            self._layout.epoch,
            tuple(
                AssignedSegment(
                    each.segment_id,
                    each.hash_range,
                    str(physical_name(self.topic, each)),
                    None if places is None else places.of(each),
                )
                for each in known
            ),
            resets=self.record.resets,
            term=0 if places is None else self._leadership.epoch,
            is_partial=session.is_waiting,
            owed=tuple(sorted(session.owed)),
        )

    # Sessions.

    async def _join(self, name: str) -> ConsumerSession:
        """A consumer that is new: recorded before anything is assigned to it (R468-63)."""
        if len(self._sessions) >= self._config.max_consumers_per_subscription:
            raise ConsumerBusy(
                f"Subscription {self.name} of {self.topic} has {len(self._sessions)} consumers, the limit "
                "scalable_topics.max_consumers_per_subscription; close one or wait until one has left."
            )
        self._members.owe_removal(name)
        saved = await self._registrations.save(name, lambda _old: RegistrationRecord())
        if self.is_closed:  # it came too late: nobody was told of it, and whoever removed the others did not see it
            await self._registrations.take_back(name, saved)
        self._check_alive()
        session = self._members.join(name, saved)
        await self._rebalance()
        self.drains.hurry()
        return session

    def _gone(self, session: ConsumerSession) -> None:
        """A connected consumer that has left without a word."""
        if session.handle is not None and self._leadership.holds():
            self._tell(session.name, session.handle.push, ConsumerAssignment(self._layout.epoch, resets=self.record.resets))
            session.detach(self._clock.now_ms())
            self._members.expire(session)

    def _tell(self, name: str, how: Callable[P, None], *args: P.args, **options: P.kwargs) -> None:
        """One who cannot be told is its own concern: the others must hear of theirs, and what is being done must be done."""
        try:
            how(*args, **options)
        except Exception:
            log.exception("consumer %s of %s could not be told what concerns it", name, self.name)

    def _departures(self) -> Departures:
        return Departures(
            self._clock,
            self._segments,
            self.topic,
            self.name,
            self._sessions,
            lambda: self._layout,
            left=self._gone,
        )

    # In the background.

    async def _first_look(self) -> None:
        await self.drains.look_now()
        self._news.set()

    async def _work(self) -> None:
        """Whatever events ask for: evict, clean up, assign."""
        while True:
            await self._news.wait()
            self._news.clear()
            try:
                async with self._turn:
                    for session in self._members.expired():
                        log.info("consumer %s of %s did not come back in time", session.name, self.name)
                        self._members.drop(session)
                    await self._members.remove_leftovers()
                    await self._rebalance()
            except StaleLeader as error:
                log.info("subscription %s of %s stops here: %s", self.name, self.topic, error)
                self._leadership.step_down()  # it may be for a moment only, but nobody would go on here
                return
            except StoreError as error:
                log.warning("subscription %s of %s tries again: %s", self.name, self.topic, error)
                self._members.try_again()
            except InvariantBroken:
                raise
            except Exception:  # or nobody would ever be assigned anything again
                log.exception("subscription %s of %s could not be looked after and is tried again", self.name, self.topic)
                self._members.try_again()

    def _check_alive(self) -> None:
        if self.is_closed:
            raise Closed(f"Subscription {self.name} of {self.topic} is no longer coordinated here; register again.")


def _renamed(old: SegmentLayout, new: SegmentLayout) -> set[int]:
    """Ids that mean another topic now: those of a regular topic that was taken for a plain one and is partitioned."""
    return {
        number
        for number, each in old.all_segments.items()
        if (now := new.all_segments.get(number)) is not None and now.legacy_topic_name != each.legacy_topic_name
    }


def _check_name(consumer: str) -> None:
    if not consumer or len(consumer) > MAX_CONSUMER_NAME:
        raise InvalidArgument(f"A consumer needs a name of 1 to {MAX_CONSUMER_NAME} characters; this one has {len(consumer)}.")
