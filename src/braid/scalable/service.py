"""`ScalableTopicService`: scalable topics at one broker.

Owns the controllers of this broker, one per topic and shared by everybody who needs it, until nobody has for a while; what any
broker may do without leading is done by `TopicRecords`. Looks from time to time for topics that nobody leads and that are not
at rest, so that an interrupted operation is finished even if no client ever asks again. Holds no layout itself and must not
touch a segment except through `SegmentOps`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Final, TypeAlias

from braid.errors import (
    BraidError,
    Closed,
    InvariantBroken,
    LedElsewhere,
    NotReady,
    PreconditionFailed,
    StoreUnavailable,
    TopicNotFound,
)
from braid.metadata.api import MetadataStore
from braid.metadata.values import read_json
from braid.model.names import Domain, NamespaceName, TopicName
from braid.model.routing import Routing
from braid.model.segments import SegmentInfo, physical_name
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks
from braid.scalable.api import LogOf, Retention, SegmentOps
from braid.scalable.config import ScalableConfig
from braid.scalable.controller import ScalableTopicController
from braid.scalable.counts import OperationCounts
from braid.scalable.draining import initial_for
from braid.scalable.plans import each
from braid.scalable.records import REGULAR, TOPICS, Initial, ScalableTopicMetadata, SubscriptionMetadata, controller_path
from braid.scalable.regular import RegularTopicController
from braid.scalable.topic_records import TopicRecords

log = logging.getLogger(__name__)

FIRST_LOOK_SECONDS: Final = 0.02
"""Between two looks whether another broker has finished a creation; doubles."""

AnyController: TypeAlias = ScalableTopicController | RegularTopicController


class ScalableTopicService:
    """One per broker."""

    def __init__(
        self,
        runtime: Runtime,
        store: MetadataStore,
        config: ScalableConfig,
        segments: SegmentOps,
        *,
        broker_id: Callable[[], str],
        retention: Callable[[NamespaceName], Awaitable[Retention]],
        owns: Callable[[TopicName], bool],
        partitions: Callable[[TopicName], Awaitable[int | None]],
        log_of: LogOf,
    ) -> None:
        """`owns` says whether a topic's bundle is ours, `partitions` how many a regular topic has: 0 = it is a plain one,
        None = there is none. A scalable topic is not made, and one that is just being made is taken back by its leader, if a
        regular one has its name."""
        self.config = config
        self._runtime = runtime
        self._store = store
        self._segments = segments
        self._broker_id = broker_id
        self._retention = retention
        self._owns = owns
        self._partitions = partitions
        self._log_of = log_of
        self._records = TopicRecords(runtime, store, config, partitions)
        self.counts = OperationCounts()
        self._controllers: dict[TopicName, AnyController] = {}
        self._orphans: set[TopicName] = set()  # topics of others without a leader, at the last look
        self._is_closed = False
        self._tasks = Tasks("scalable topics")

    # Life.

    async def start(self) -> None:
        """Begin to look after topics that nobody leads."""
        if self.config.enabled:
            self._tasks.spawn(self._adopt_for_ever(), "adopt")

    async def close(self) -> None:
        """Give up every leadership and stop. Idempotent."""
        self._is_closed = True
        await self._tasks.close()
        await each(list(self._controllers.values()), lambda controller: controller.close())
        self._controllers.clear()

    def kill(self) -> None:
        """Stop as a crash would: nothing is written."""
        self._is_closed = True
        self._tasks.cancel()
        for controller in list(self._controllers.values()):
            controller.kill()

    def controllers(self) -> list[AnyController]:
        """Those there are at this broker now."""
        return list(self._controllers.values())

    # What any broker does.

    async def create_topic(
        self,
        topic: TopicName,
        segments: int,
        *,
        properties: Mapping[str, str] | None = None,
        routing: Routing | None = None,
    ) -> None:
        """Make a topic with so many segments; returns when its segments exist. Raises AlreadyExists, also if a regular topic
        has the name, InvalidArgument, InvalidTopicName; and NotReady if the topic is made but its segments take long."""
        metadata = await self._records.put_new(topic, segments, properties=properties, routing=routing)
        await self._until_created(topic, metadata.incarnation)

    async def metadata(self, topic: TopicName, *, fresh: bool = True) -> ScalableTopicMetadata:
        """The topic's record. Raises TopicNotFound."""
        return await self._records.metadata(topic, fresh=fresh)

    async def topics(
        self, namespace: NamespaceName, properties: Mapping[str, str] | None = None, *, living: bool = False
    ) -> list[str]:
        """Names of the namespace's scalable topics, in order; with properties those that have all of them, with `living` those
        that are not being deleted."""
        return await self._records.topics(namespace, properties, living=living)

    async def register_queue_subscription(
        self, topic: TopicName, subscription: str, initial: Initial, *, besides: TopicName | None = None
    ) -> SubscriptionMetadata:
        """Make the topic-level record of a subscription that a queue consumer attaches to, or return the one there is (L-07).
        A new one has cursors on all segments when this returns, as far as their owners answer; the leader makes the rest. On
        the segment `besides` the caller makes it himself.
        Raises TopicNotFound, NotReady while the topic is being made."""
        record, metadata = await self._records.register_queue_subscription(topic, subscription, initial)
        if metadata is not None:
            wanted = [one for one in metadata.layout.all_segments.values() if physical_name(topic.scalable, one) != besides]
            await self._make_cursors(topic.scalable, subscription, record, metadata, wanted)
            if metadata.is_at_rest:  # no leader would make the cursors that are missing
                with suppress(BraidError):
                    await self.controller(topic)
        return record

    async def _make_cursors(
        self,
        topic: TopicName,
        subscription: str,
        record: SubscriptionMetadata,
        metadata: ScalableTopicMetadata,
        wanted: list[SegmentInfo],
    ) -> None:
        """The consumer may know an old layout only, and a split may have looked for subscriptions just before this one came: it
        must not depend on either what is kept for it (INV7)."""

        async def make(segment: SegmentInfo) -> None:
            try:
                await self._segments.create_subscription(
                    physical_name(topic, segment),
                    subscription,
                    initial_for(record, segment),
                    epoch=metadata.leader_epoch,
                    incarnation=metadata.incarnation,
                )
            except TopicNotFound:
                return  # not made yet, then it gets its cursors with it; or sealed and without data
            except BraidError as error:
                log.info(
                    "subscription %s has no cursor on segment %d of %s yet: %s", subscription, segment.segment_id, topic, error
                )

        await each(wanted, make)

    async def leader_id(self, topic: TopicName) -> str | None:
        """Broker id of the leader of the topic's controller; None if there is none at the moment."""
        name = await self._canonical(topic)
        root = TOPICS if name.domain is Domain.TOPIC else REGULAR
        record = await self._store.get(controller_path(name, root), fresh=True)
        return None if record is None else read_json(str, record.key, record.value)

    # Controllers.

    async def controller(self, topic: TopicName) -> AnyController:
        """This broker's controller of a topic, made if need be; it campaigns, and has made its first attempt. Raises
        TopicNotFound."""
        key = await self._canonical(topic)
        while True:
            if self._is_closed:
                raise Closed("This broker is being closed.")
            if not self._broker_id():
                raise NotReady("This broker is just starting and has no address yet; try again.")
            found = self._controllers.get(key)
            if found is not None and found.is_closed:
                await found.close()
                if self._controllers.get(key) is found:
                    del self._controllers[key]
                continue
            if found is None:
                found = self._controllers[key] = self._make(key)
            try:
                await found.start()
            except BraidError:
                await found.close()
                raise
            return found

    async def lead(self, topic: TopicName) -> AnyController:
        """The controller of a scalable or regular topic, leading and ready. Raises LedElsewhere with the leader's broker id,
        TopicNotFound, Conflict if the topic is being deleted, NotReady if it takes long."""
        controller = await self.controller(topic)
        try:
            await controller.wait_ready()
        except LedElsewhere as error:
            raise await self._led_elsewhere(controller.topic) from error
        return controller

    async def lead_scalable(self, topic: TopicName) -> ScalableTopicController:
        """As `lead`, of a scalable topic only."""
        controller = await self.lead(topic.scalable)
        assert isinstance(controller, ScalableTopicController)
        return controller

    async def delete_topic(self, topic: TopicName, *, force: bool = False) -> None:
        """Delete a topic that this broker leads, with everything in it. Without `force` one with connected clients is kept, and
        an operation that is under way is waited for.
        Raises LedElsewhere, TopicNotFound, PreconditionFailed, Conflict."""
        controller = await self.controller(topic.scalable)
        assert isinstance(controller, ScalableTopicController)
        if not controller.is_leading:
            raise await self._led_elsewhere(controller.topic)
        if not force:
            await self._check_unused(controller)
        await controller.delete(force=force)

    # Inside.

    async def _canonical(self, topic: TopicName) -> TopicName:
        """The one name under which a topic's controller is kept: a regular name may be that of a scalable topic (L-32)."""
        if topic.domain is Domain.PERSISTENT and await self._records.read(topic.scalable) is None:
            return topic.base
        return topic.scalable

    def _make(self, topic: TopicName) -> AnyController:
        if topic.domain is Domain.TOPIC:
            return ScalableTopicController(
                self._runtime,
                self._store,
                self.config,
                self._segments,
                topic,
                broker_id=self._broker_id(),
                retention=self._retention,
                partitions=self._partitions,
                on_closed=self._forget,
                counts=self.counts,
            )
        return RegularTopicController(
            self._runtime,
            self._store,
            self.config,
            self._segments,
            topic,
            broker_id=self._broker_id,
            partitions=self._partitions,
            log_of=self._log_of,
            on_closed=self._forget,
        )

    def _forget(self, controller: AnyController) -> None:
        found = self._controllers.get(controller.topic)
        if found is controller:
            del self._controllers[controller.topic]

    async def _led_elsewhere(self, topic: TopicName) -> LedElsewhere:
        leader = await self.leader_id(topic)
        if leader is None:
            return LedElsewhere(f"Nobody leads {topic} at the moment; try again.")
        return LedElsewhere(f"Broker {leader} leads {topic}; ask that one.", leader)

    async def _until_created(self, topic: TopicName, incarnation: str) -> None:
        """Wait until the leader, here or elsewhere, has made the segments."""
        clock = self._runtime.clock
        deadline = clock.monotonic() + self.config.operation_wait_seconds
        controller = await self.controller(topic)
        with suppress(LedElsewhere):
            await controller.wait_ready()
        pause = FIRST_LOOK_SECONDS
        while True:
            found = await self.metadata(topic)
            if found.incarnation != incarnation or found.is_deleting:
                raise TopicNotFound(f"{topic} was deleted while it was being made.")
            if found.pending_operation is None or found.pending_operation.kind != "create":
                return
            if clock.monotonic() + pause > deadline:
                raise NotReady(f"{topic} is made, but not all of its segments are yet; they follow by themselves.")
            await clock.sleep(pause)
            pause = min(pause * 2, 1.0)

    async def _check_unused(self, controller: ScalableTopicController) -> None:
        async def clients(segment: SegmentInfo) -> int:
            try:
                stats = await self._segments.stats(physical_name(controller.topic, segment))
            except BraidError:
                return 0  # whoever cannot be asked has no reason to keep the topic
            return stats.producers + stats.readers + sum(map(len, stats.consumers.values()))

        count = sum(await each(controller.layout.all_segments.values(), clients))
        if count:
            raise PreconditionFailed(
                f"{controller.topic} has {count} producers and consumers on its segments; close them, or delete it by force."
            )

    async def _adopt_for_ever(self) -> None:
        while True:
            await self._runtime.clock.sleep(self.config.adopt_seconds)
            try:
                await self.adopt()
            except Closed:
                return
            except BraidError as error:
                log.info("could not look for topics that nobody leads: %s", error)
            except InvariantBroken:
                raise
            except Exception:  # or nobody would ever look for them again
                log.exception("could not look for topics that nobody leads, and looks again")

    async def adopt(self) -> None:
        """Campaign for every topic that nobody leads and that is not at rest: at once if it is in one of our bundles, else if
        nobody did since the last time we looked. The bundle of a broker that died stays free until a client asks for it, and
        what was begun there must be finished all the same (INV6)."""
        orphans: set[TopicName] = set()
        async for topic in self._records.topics_to_lead():
            try:
                if topic in self._controllers or await self.leader_id(topic) is not None:
                    continue
                if not self._owns(topic) and topic not in self._orphans:
                    orphans.add(topic)
                    continue
                await self._adopt(topic)
            except (StoreUnavailable, Closed):
                raise  # it is the same with the others
            except BraidError as error:
                log.info("could not adopt %s: %s", topic, error)
        self._orphans = orphans

    async def _adopt(self, topic: TopicName) -> None:
        try:
            await self.controller(topic)
        except Closed as error:
            if self._is_closed:
                raise
            log.info("could not adopt %s: %s", topic, error)  # its controller was closed meanwhile, or could not begin
