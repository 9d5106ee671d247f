"""Administrators of scalable topics: one who asks any broker and follows it to the leader, and one who never rests.

What they ask for and what became of it is written down; `info` means that nobody knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from braid.broker.service import BrokerService
from braid.errors import BraidError, DeadlineExceeded, LedElsewhere, RequestError, Unavailable
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.runtime.env import Random
from braid.scalable.controller import ScalableTopicController
from braid.scalable.records import SubscriptionKind
from braid.testing.sim.history import Kind
from braid.testing.sim.layouts import topic_records
from braid.testing.sim.loop import Node
from braid.testing.sim.ports import START_MS
from braid.testing.sim.world import World

REDIRECTS = 5
MOST_SEGMENTS = 8
"""Active segments above which the administrator only merges."""

EXTRA = "extra-"
"""Names of the subscriptions it makes begin so."""


class Administrator:
    """Asks any broker for an operation and follows it to the leader, as the admin client does."""

    def __init__(self, world: World, name: str, rng: Random) -> None:
        self.world = world
        self.name = name
        self.node = Node(name)
        self._rng = rng

    async def call(
        self, topic: str, op: str, details: list[Any], work: Callable[[ScalableTopicController], Awaitable[Any]]
    ) -> Kind:
        """One operation at the leader; returns how it ended: ok, fail (refused), info (nobody knows)."""
        value = [topic, *details]
        number = self.world.history.invoke(self.node.name, op, value)
        kind = await self._at_leader(TopicName.parse(topic), work)
        self.world.history.add(self.node.name, kind, op, value, number=number)
        return kind

    async def _at_leader(self, topic: TopicName, work: Callable[[ScalableTopicController], Awaitable[Any]]) -> Kind:
        async def there(service: BrokerService) -> Any:
            return await work(await service.scalable.lead_scalable(topic))

        host = self._any_host()
        for _attempt in range(REDIRECTS):
            try:
                await self.world.calls.call(self.node, host, there, 45.0)
                return "ok"
            except LedElsewhere as error:
                host = error.broker_id.partition(":")[0] if error.broker_id else self._any_host()
                await asyncio.sleep(0.2)
            except (Unavailable, DeadlineExceeded) as error:
                return self._unknown(error)
            except RequestError as error:
                self.world.history.remark(f"{self.node.name}: {type(error).__name__}: {error}")
                return "fail"
            except BraidError as error:
                return self._unknown(error)
        return "info"

    def _unknown(self, error: BraidError) -> Kind:
        self.world.history.remark(f"{self.node.name}: {type(error).__name__}: {error}")
        return "info"

    def _any_host(self) -> str:
        return f"broker-{self._rng.randrange(len(self.world.brokers))}"

    async def until_done(self, topic: str, op: str, details: list[Any], work: Callable[..., Awaitable[Any]]) -> None:
        """Until it is done, or refused because it was done before."""
        kind: Kind = "info"
        while kind == "info":
            kind = await self.call(topic, op, details, work)
            await asyncio.sleep(0.5)

    async def create(self, topic: str, segments: int) -> None:
        """In peace: raises what goes wrong."""
        name = TopicName.parse(topic)
        await self.world.calls.call(
            self.node, self._any_host(), lambda service: service.create_scalable_topic(name, segments), 45.0
        )

    async def delete(self, topic: str) -> None:
        await self.until_done(topic, "delete", [], lambda controller: controller.delete())

    async def subscribe(
        self, topic: str, subscription: str, kind: SubscriptionKind = "STREAM", initial: Any = "earliest"
    ) -> str:
        return await self.call(
            topic, "subscribe", [subscription], lambda controller: controller.create_subscription(subscription, kind, initial)
        )


class Churn(Administrator):
    """An administrator who never rests: splits, merges, subscriptions that come and go, seeks, prunes."""

    def __init__(
        self, world: World, name: str, rng: Random, topics: list[str], *, pace: float, sought: str | None = None
    ) -> None:
        super().__init__(world, name, rng)
        self.topics = topics
        self.is_stopping = False
        self.is_done = False
        self._pace = pace
        self._sought = sought
        """A subscription that may be sought and cleared."""
        self.made: list[tuple[str, str, str]] = []
        """Topic, name and kind of the subscriptions it made that still exist."""
        self._count = 0

    def start(self) -> None:
        self.world.spawn(self.node, self._live(), self.node.name)

    async def _live(self) -> None:
        while not self.is_stopping:
            await asyncio.sleep(self._rng.expovariate(1 / self._pace))
            await self._act(self._rng.choice(self.topics))
        self.is_done = True

    async def _act(self, topic: str) -> None:
        chance = self._rng.random()
        if chance < 0.66:
            await self._resize(topic)
        elif chance < 0.80:
            self._count += 1
            name = f"{EXTRA}{self._count}"
            kind: SubscriptionKind = self._rng.choice(("STREAM", "QUEUE"))
            if await self.subscribe(topic, name, kind) == "ok":
                self.made.append((topic, name, kind))
        elif chance < 0.86 and self.made:
            where, name, _kind = self.made.pop(self._rng.randrange(len(self.made)))
            await self.until_done(where, "unsubscribe", [name], lambda controller: controller.delete_subscription(name))
        elif chance < 0.90:
            await self.call(topic, "prune", [], lambda controller: controller.prune())
        elif self._sought is not None:
            await self._reset(topic, self._sought)

    async def _reset(self, topic: str, subscription: str) -> None:
        now = self.world.loop.time()
        if self._rng.random() < 0.75:
            moment = START_MS + int(self._rng.uniform(0, now - 1000.0) * 1000)
            await self.until_done(
                topic, "seek-to", [subscription, moment], lambda controller: controller.seek(subscription, moment)
            )
        else:
            await self.until_done(
                topic, "clear-backlog", [subscription], lambda controller: controller.clear_backlog(subscription)
            )

    async def _resize(self, topic: str) -> None:
        record = topic_records(self.world.engine.tables.rows).get(topic)
        if record is None:
            return
        layout: SegmentLayout = record.layout
        active = layout.active_in_order
        if len(active) < 2 or (len(active) < MOST_SEGMENTS and self._rng.random() < 0.5):
            chosen = self._rng.choice(active).segment_id
            await self.call(topic, "split", [chosen], lambda controller: controller.split_segment(chosen))
        else:
            at = self._rng.randrange(len(active) - 1)
            pair = [active[at].segment_id, active[at + 1].segment_id]
            self._rng.shuffle(pair)
            await self.call(topic, "merge", pair, lambda controller: controller.merge_segments(*pair))
