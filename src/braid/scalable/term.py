"""`Term`: one time in office of a topic's leader, from the claim of the record to the loss of the leadership.

Owns the order in which a new leader takes over (claim, finish what is pending, repair, restore coordinators, serve), the turns
of operations, the retry of an interrupted operation until it is done, and the coordinators. Everything of a term ends with it:
nothing is done for a leadership that may be over (INV4, L-01, L-02). Which term there is, is the controller's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, TypeVar

from braid.errors import (
    BraidError,
    Conflict,
    InvariantBroken,
    KindConflict,
    LedElsewhere,
    NotReady,
    SubscriptionNotFound,
    TopicNotFound,
)
from braid.metadata.claims import StaleLeader
from braid.metadata.election import Leadership
from braid.model.layout import SegmentLayout
from braid.runtime.plans import step
from braid.runtime.tasks import Tasks
from braid.scalable import plans_layout, plans_prune, plans_topic, plans_upkeep
from braid.scalable.api import Retention
from braid.scalable.coordinator import SubscriptionCoordinator
from braid.scalable.counts import OperationCounts
from braid.scalable.group_ends import create_subscription, end_groups
from braid.scalable.plans import TopicGone, TopicWork, describe
from braid.scalable.records import Initial, SubscriptionKind, SubscriptionMetadata
from braid.scalable.subscription_plans import SubscriptionPlans
from braid.scalable.turns import OperationTurns

log = logging.getLogger(__name__)
T = TypeVar("T")

FIRST_RETRY_SECONDS: Final = 0.1


class Term:
    """What a leader does with one topic."""

    def __init__(
        self,
        work: TopicWork,
        retention: Callable[[], Awaitable[Retention]],
        regular_partitions: Callable[[], Awaitable[int | None]],
        on_gone: Callable[[], None],
        on_unused: Callable[[], None],
        counts: OperationCounts,
    ) -> None:
        """`regular_partitions` is not None if a regular topic has the same name. `on_gone` is called once if the topic turns
        out to be deleted, by us or by somebody else; `on_unused` from time to time while nobody needs a leader."""
        self.work = work
        self.coordinators: dict[str, SubscriptionCoordinator] = {}
        self.is_ready = False
        self.is_over = False
        self.has_deleted = False
        """Whether it ended because it has deleted the topic."""
        self._retention = retention
        self._regular_partitions = regular_partitions
        self._on_gone = on_gone
        self._on_unused = on_unused
        self._counts = counts
        self._clock = work.runtime.clock
        self._turns = OperationTurns(self._clock, str(work.topic))
        self._turns.holder = "take-over by a new leader"
        self._used_at = self._clock.monotonic()
        self._waiting: list[asyncio.Future[None]] = []  # for is_ready or is_over
        self._is_settling = False  # an interrupted operation has the turn until it is finished
        self._is_deletion_asked_for = False
        self._announced = ""  # id of the interrupted operation that the log tells of
        self._tasks = Tasks(f"leader of {work.topic}")
        self._plans = SubscriptionPlans(
            work.runtime,
            work.store,
            work.config,
            work.segments,
            work.leadership,
            work.topic,
            layout=lambda: work.layout,
            coordinator=self.coordinators.get,
            incarnation=lambda: work.incarnation,
        )

    @property
    def leadership(self) -> Leadership:
        return self.work.leadership

    @property
    def is_unused(self) -> bool:
        """Whether nobody has wanted anything of this leader for long, and nothing is under way."""
        limit = self.work.config.idle_seconds
        return (
            self.is_ready
            and 0 < limit <= self._clock.monotonic() - self._used_at
            and self._turns.holder is None
            and not any(each.state().consumer_count for each in self.coordinators.values())
        )

    def used(self) -> None:
        """Somebody wants something of this leader."""
        self._used_at = self._clock.monotonic()

    def start(self) -> None:
        """Take over in the background."""
        self._tasks.spawn(self._run(), "term")

    def stop(self) -> None:
        """The leadership is over, or the topic: do nothing more. Idempotent."""
        self.is_over = True
        self.is_ready = False
        self._tell()
        self._tasks.cancel()

    async def close(self) -> None:
        """Stop, and tell the consumers that they must look for another leader. Writes nothing."""
        self.stop()
        await self._tasks.close()
        for coordinator in list(self.coordinators.values()):
            await coordinator.close()
        self.coordinators.clear()

    def kill(self) -> None:
        """As a crash."""
        self.stop()
        for coordinator in self.coordinators.values():
            coordinator.kill()

    async def wait_ready(self) -> None:
        """Until this leader serves. Raises LedElsewhere if its term ends first, Conflict if the topic is being deleted,
        NotReady if it takes too long."""
        await self._wait(lambda: self.is_ready or self.is_over or self._is_deleting())
        if self.is_over:
            raise self._not_leading()
        if self._is_deleting():
            raise self._being_deleted()
        if not self.is_ready:
            raise NotReady(f"The leader of {self.work.topic} is not ready yet ({self._turns.holder}); try again.")

    async def _wait(self, happened: Callable[[], bool]) -> None:
        """Until it has happened, or an operation's patience is over."""
        deadline = self._clock.monotonic() + self.work.config.operation_wait_seconds
        while not happened() and (left := deadline - self._clock.monotonic()) > 0:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(woken)
            timer = self._clock.call_later(left, _wake, woken)
            try:
                await woken
            finally:
                timer.cancel()
                self._waiting.remove(woken)

    def _is_deleting(self) -> bool:
        return self.work.is_claimed and self.work.metadata.is_deleting

    def _tell(self) -> None:
        for each in self._waiting:
            _wake(each)

    # Operations.

    async def operate(self, what: str, body: Callable[[], Awaitable[T]], told: Callable[[T], str | None]) -> T:
        """Run an operation when its turn comes; it is finished even if the caller goes away. `told` says of its result what the
        log shall say, None = nothing. Raises Conflict if another one takes too long, LedElsewhere if the leadership is over,
        and what the operation raises; if that left it unfinished, it goes on in the background until it is done."""
        return await self._begin(what, body, told)

    def _begin(self, what: str, body: Callable[[], Awaitable[T]], told: Callable[[T], str | None]) -> asyncio.Future[T]:
        """The same; its outcome need not be waited for."""
        if self.is_over:
            raise self._not_leading()
        outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        outcome.add_done_callback(lambda outcome: outcome.cancelled() or outcome.exception())  # told, or nobody wants it
        task = self._tasks.spawn(self._perform(what, body, told, outcome), what)
        task.add_done_callback(lambda _task: _fail(outcome, self._not_leading()))  # cancelled, maybe before it began
        return outcome

    async def _perform(
        self, what: str, body: Callable[[], Awaitable[T]], told: Callable[[T], str | None], outcome: asyncio.Future[T]
    ) -> None:
        try:
            await self._turns.take(what, self.work.config.operation_wait_seconds)
        except Conflict as error:
            _fail(outcome, error)
            return
        began = self._clock.monotonic()
        try:
            result = await body()
            took = self._clock.monotonic() - began
            self._counts.note(what, took, is_done=True)
            if (text := told(result)) is not None:
                log.info("%s of %s%s: done in %d ms", what, self.work.topic, text, took * 1000)
            if not outcome.done():
                outcome.set_result(result)
        except StaleLeader:
            self.work.leadership.step_down()
            return
        except InvariantBroken:
            raise
        except Exception as error:  # the caller is told; what it left behind is finished before another operation may begin
            if not isinstance(error, BraidError):
                log.exception("the %s of %s failed in an unexpected way", what, self.work.topic)
            self._counts.note(what, self._clock.monotonic() - began, is_done=False)
            _fail(outcome, error)
            self._is_settling = True
            await self._until_done(self._settle, f"the {what}")
            self._is_settling = False
        if not self.is_over:
            self._turns.give_back()

    async def split(self, segment_id: int) -> None:
        await self.operate(
            f"split of segment {segment_id}",
            lambda: plans_layout.split(self.work, segment_id, self._notify),
            lambda _nothing: self._children_of(segment_id),
        )

    async def merge(self, first_id: int, second_id: int) -> None:
        await self.operate(
            f"merge of segments {first_id} and {second_id}",
            lambda: plans_layout.merge(self.work, first_id, second_id, self._notify),
            lambda _nothing: self._children_of(first_id),
        )

    async def prune(self) -> list[int]:
        async def body() -> list[int]:
            return await plans_prune.prune(self.work, await self._retention(), self._notify)

        return await self.operate("prune", body, lambda gone: f", segments {_listed(gone)} removed" if gone else None)

    async def look_after(self) -> None:
        """Repair what nobody asked for."""

        async def body() -> list[int]:
            if await self._is_left_over():
                await self._settle()
            return [] if self.is_over else await plans_upkeep.look_after(self.work, self._notify)

        await self.operate("repair", body, lambda repaired: f", segments {_listed(repaired)}" if repaired else None)

    async def delete(self, *, force: bool = False) -> None:
        """Returns when the topic is gone. `force` puts the deletion in the place of an operation that cannot be finished.
        Raises Conflict if the topic is being deleted already or another operation is not finished in time, NotReady if the
        deletion is not."""

        async def body() -> None:
            await plans_topic.delete(self.work)
            await self._roll_delete()

        if self._is_deleting() or self._is_deletion_asked_for:
            raise self._being_deleted()
        self._is_deletion_asked_for = True
        try:
            if force and self._is_settling:
                # It waits for its turn as well: the other operation may be finished at this very moment.
                queued = self._begin("deletion", body, lambda _nothing: None)
                queued.add_done_callback(lambda _queued: self._tell())
                try:
                    await plans_topic.delete(self.work, force=True)  # whoever tries to finish the other one finds this instead
                except BraidError:
                    if not self.has_deleted:
                        raise
                await self._wait(lambda: self.is_over or queued.done())
                if not self.is_over:
                    raise NotReady(f"{self.work.topic} is being deleted; that takes longer than usual and goes on by itself.")
            else:
                await self.operate("deletion", body, lambda _nothing: None)
        finally:
            self._is_deletion_asked_for = False

    async def create_subscription(self, name: str, kind: SubscriptionKind, initial: Initial) -> None:
        began = self._clock.now_ms()

        async def body() -> bool:
            grace = self.work.config.group_grace_seconds
            record = await create_subscription(self._plans, self.coordinators, grace, name, kind, initial)
            await self._coordinate(name, record)
            return record.created_ms >= began  # else it was there already

        await self.operate(f"creation of subscription {name}", body, lambda is_new: f" ({kind}, {initial})" if is_new else None)

    async def end_groups(self) -> None:
        """Remove the checkpoint groups whose members left long ago."""
        if any(each.is_empty_group for each in self.coordinators.values()):
            await self.operate("end of checkpoint groups", self._end_groups, lambda ended: f": {ended}" if ended else None)

    async def _end_groups(self) -> list[str]:
        return await end_groups(self._plans, self.coordinators, self.work.config.group_grace_seconds)

    async def delete_subscription(self, name: str) -> None:
        async def body() -> None:
            await self._plans.delete(name)
            coordinator = self.coordinators.pop(name, None)
            if coordinator is not None:
                await coordinator.close()

        await self.operate(f"deletion of subscription {name}", body, lambda _nothing: "")

    async def seek(self, name: str, timestamp_ms: int) -> None:
        await self.operate(
            f"seek of subscription {name}",
            lambda: self._plans.seek(name, timestamp_ms),
            lambda _nothing: f" to {timestamp_ms}",
        )

    async def clear_backlog(self, name: str) -> None:
        await self.operate(
            f"clear-backlog of subscription {name}", lambda: self._plans.clear_backlog(name), lambda _nothing: ""
        )

    async def remove_consumer(self, subscription: str, consumer: str) -> None:
        async def body() -> None:
            coordinator = self.coordinators.get(subscription)
            if coordinator is None or coordinator.is_closed:
                raise SubscriptionNotFound(
                    f"{self.work.topic} has no subscription {subscription} whose consumers register; see its stats."
                )
            await coordinator.remove(consumer)

        await self.operate(f"removal of consumer {consumer} from subscription {subscription}", body, lambda _nothing: "")

    def _children_of(self, segment_id: int) -> str:
        layout = self.work.layout
        parent = layout.all_segments.get(segment_id)
        return f" into {_listed(() if parent is None else parent.child_ids)} (epoch {layout.epoch})"

    async def coordinator(self, name: str, kind: SubscriptionKind, initial: Initial) -> SubscriptionCoordinator:
        """Of a subscription, which is made if there is none. Raises Conflict if it is of another kind."""
        found = self.coordinators.get(name)
        if found is None or found.is_closed:
            await self.create_subscription(name, kind, initial)
            found = self.coordinators.get(name)
        if found is None or found.record.type != kind:
            other = "QUEUE" if found is None else found.record.type
            raise KindConflict(
                f"Subscription {name} of {self.work.topic} is one of {other} consumers; a {kind} consumer needs one of its own."
            )
        return found

    # Taking over.

    async def _run(self) -> None:
        """Take over, then look after the topic for as long as the term lasts."""
        await self._until_done(self.work.claim, "the claim")
        if not self.work.metadata.is_deleting:
            is_settled = await self._attempt(self._settle, "what the last leader left")
            await self._until_done(self._coordinate_all, "restoring subscriptions")
            if self.is_over:
                return
            self.is_ready = True
            self._tell()
        else:
            is_settled = False
            self._tell()
        if not is_settled:
            self._is_settling = True
            await self._until_done(self._settle, "what the last leader left")
            self._is_settling = False
        if self.is_over:
            return
        self._turns.give_back()
        await self._until_done(self.look_after, "the repair")
        while not self.is_over:
            await self._clock.sleep(self.work.config.prune_seconds)
            await self._attempt(self.look_after, "the repair")
            await self._attempt(self.prune, "the prune")
            await self._attempt(self.end_groups, "the end of checkpoint groups")
            await self._attempt(self._rest_if_unneeded, "the look whether anybody needs it")

    async def _rest_if_unneeded(self) -> None:
        if self.is_unused and await plans_upkeep.is_unneeded(self.work):
            self._on_unused()

    async def _settle(self) -> None:
        """Finish every operation that the records show as unfinished."""
        await self.work.refresh()
        pending = self.work.pending
        if pending is not None and pending.kind != "create" and pending.operation_id != self._announced:
            self._announced = pending.operation_id
            log.info("the %s of %s was interrupted and is being finished", describe(pending), self.work.topic)
        match pending and pending.kind:
            case "create":
                if await self._regular_partitions() is not None:
                    # Both are written before they look for the other: one of them sees it, whoever crashes in between.
                    log.warning("%s is taken back: a regular topic of that name was made at the same time", self.work.topic)
                    await plans_topic.delete(self.work, force=True)
                    await self._roll_delete()
                    return
                await plans_topic.roll_create(self.work)
            case "delete":
                await self._roll_delete()
                return
            case "split" | "merge":
                await plans_layout.roll_forward(self.work, self._notify)
            case "prune":
                await plans_prune.roll_forward(self.work, self._notify)
        if self.work.pending is not None:
            raise NotReady(f"The {describe(self.work.pending)} came in between.")
        if pending is not None:
            log.info(
                "%s of %s: done, %d ms after it was begun (%d active segments, epoch %d)",
                describe(pending),
                self.work.topic,
                self._clock.now_ms() - pending.started_ms,
                len(self.work.layout.active_segments),
                self.work.layout.epoch,
            )
        # Also if nothing was pending: the last step may have been done without our knowing it, and before anybody was told.
        self._notify(self.work.layout)
        await self._plans.roll_forward()
        if self.is_ready:
            await self._coordinate_all()

    async def _is_left_over(self) -> bool:
        """Whether a record shows an operation while nobody has the turn to finish one: it was written late, or by force."""
        await self.work.refresh()
        if self.work.pending is not None:
            return True
        return any(record.pending is not None for record in (await self.work.subscriptions()).values())

    async def _roll_delete(self) -> None:
        async with step("delete:close-coordinators"):
            self.is_ready = False
            self._tell()
            error = TopicNotFound(f"{self.work.topic} is being deleted; create it again to go on.")
            for coordinator in list(self.coordinators.values()):
                await coordinator.close(error)
            self.coordinators.clear()
        pending, count = self.work.pending, len(self.work.layout.all_segments)
        await plans_topic.roll_delete(self.work)
        self.has_deleted = True
        began = self._clock.now_ms() if pending is None else pending.started_ms
        log.info("deletion of %s with %d segments: done in %d ms", self.work.topic, count, self._clock.now_ms() - began)
        self._gone()

    async def _coordinate_all(self) -> None:
        records = await self.work.subscriptions()
        for name, record in records.items():
            await self._coordinate(name, record)
        for name in [each for each in self.coordinators if each not in records and each not in self.work.unreadable]:
            await self.coordinators.pop(name).close()

    async def _coordinate(self, name: str, record: SubscriptionMetadata) -> None:
        """Make the coordinator of a subscription if it needs one."""
        known = self.coordinators.get(name)
        if record.type == "QUEUE" or (known is not None and not known.is_closed):
            return
        if record.pending is not None and record.pending.kind == "delete":  # it waits for a segment; nobody joins it any more
            return
        work = self.work
        coordinator = SubscriptionCoordinator(
            work.runtime,
            work.store,
            work.config,
            work.segments,
            work.leadership,
            work.topic,
            name,
            record,
            work.layout,
            incarnation=work.incarnation,
        )
        await coordinator.restore()
        if self.is_over:
            await coordinator.close()
            return
        self.coordinators[name] = coordinator
        coordinator.on_layout_change(self.work.layout)

    def _notify(self, layout: SegmentLayout) -> None:
        for coordinator in self.coordinators.values():
            coordinator.on_layout_change(layout)

    # Looking after it.

    async def _until_done(self, action: Callable[[], Awaitable[object]], what: str) -> None:
        """Try until it works or the term is over."""
        pause = FIRST_RETRY_SECONDS
        while not self.is_over and not await self._attempt(action, what):
            await self._clock.sleep(pause * (1 + self.work.runtime.random.random() / 4))
            pause = min(pause * 2, self.work.config.reconcile_seconds)

    async def _attempt(self, action: Callable[[], Awaitable[object]], what: str) -> bool:
        try:
            await action()
        except TopicGone:
            self._gone()
        except StaleLeader as error:
            log.info("this broker no longer leads %s: %s", self.work.topic, error)
            self.work.leadership.step_down()
            self.stop()
        except BraidError as error:
            log.info("%s of %s could not be finished yet: %s", what, self.work.topic, error)
            return False
        except InvariantBroken:
            raise
        except Exception:  # or one odd record would leave the topic without a leader; the next attempt reads everything anew
            log.exception("%s of %s failed in an unexpected way and is tried again", what, self.work.topic)
            return False
        return True

    def _gone(self) -> None:
        if not self.is_over:
            self.stop()
            self._on_gone()

    def _being_deleted(self) -> Conflict:
        return Conflict(f"{self.work.topic} is being deleted already; wait until it is gone.")

    def _not_leading(self) -> LedElsewhere:
        return LedElsewhere(f"This broker does not lead {self.work.topic} any more; ask again for its leader.")


def _listed(segments: Iterable[int]) -> str:
    return ", ".join(map(str, segments))


def _wake(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)


def _fail(outcome: asyncio.Future[T], error: Exception) -> None:
    if not outcome.done():
        outcome.set_exception(error)
