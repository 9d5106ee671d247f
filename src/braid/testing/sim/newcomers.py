"""W13: subscriptions that come while the layout changes: streams and queues, at the beginning and at the end of the topic.

Queue subscriptions come by attachment, without asking the leader. Many arrive exactly while a split or merge is between two of
its steps. Each must get what was sent after it was there, one that begins at the earliest message everything, one that begins
at the latest nothing older. In the end everything is read, and then no sealed segment may be left.
"""

from __future__ import annotations

import asyncio
from typing import Any

from braid.runtime.env import Random
from braid.testing.sim.administrators import EXTRA, Administrator
from braid.testing.sim.checkers import Violation, begins_where_asked
from braid.testing.sim.faults import Nemesis
from braid.testing.sim.layouts import subscriptions_of, topic_records
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.messaging import HEALING, KEEPER
from braid.testing.sim.plan_faults import LAYOUT_STEPS, hold_up
from braid.testing.sim.ports import START_MS
from braid.testing.sim.scalable_processes import QueueProcess, StreamProcess
from braid.testing.sim.scalable_topics import ORDERED, ScalableMessaging
from braid.testing.sim.skipped import nothing_skipped


class Newcomers(ScalableMessaging):
    """See the module."""

    churn_pace = (0.3, 0.5, 0.8, 1.5)

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.topics = self.topics[:1]
        self.waiting: list[list[Any]] = []
        """Processes of subscriptions that come when a plan is at a certain step."""
        self.streams: list[str] = []
        """Subscriptions that came and are read in order."""

    def add_processes(self) -> None:
        rng = self.rng
        self.add_producers()
        self.add_streams(ORDERED, "c", 1)
        for number in range(rng.choice((4, 6, 8))):
            kind, initial = rng.choice(("stream", "queue", "queue")), rng.choice(("earliest", "latest", "latest"))
            members = [self._member(number, each, kind, initial) for each in range(rng.choice((1, 1, 2)))]
            if kind == "stream":
                self.streams.append(members[0].subscription)
            if rng.random() < 0.3:
                for member in members:
                    member.delay = rng.uniform(0.0, self.peace + self.seconds)
                self.processes += members
            else:
                self.waiting.append(members)

    def _member(self, number: int, each: int, kind: str, initial: str) -> Any:
        rng, world, topic, name = self.rng, self.world, self.topics[0], f"n{number}{'ab'[each]}"
        if kind == "stream":
            return StreamProcess(
                world, name, topic, f"new-{number}-{initial}", Random(rng.random()), every=rng.choice((1, 5)), initial=initial
            )
        process = QueueProcess(world, name, topic, f"new-{number}-{initial}", Random(rng.random()), nacks=0.05, initial=initial)
        process.away = rng.choice((0.0, rng.uniform(0.5, 5.0)))
        return process

    def _come(self) -> None:
        """The next subscription comes now."""
        if self.waiting:
            members = self.waiting.pop(0)
            self.processes += members
            for member in members:
                member.start()
            kind = "stream" if members[0].subscription in self.streams else "queue"
            position = members[0].subscription.rpartition("-")[2]
            self.history.add("world", "info", "arrive", [self.topics[0], members[0].subscription, kind, position])

    async def disturb(self, nemesis: Nemesis) -> None:
        ambush = asyncio.get_running_loop().create_task(self._ambush(nemesis, Random(self.rng.random())))
        await super().disturb(nemesis)
        ambush.cancel()
        await asyncio.wait([ambush])
        while self.waiting:
            self._come()

    async def _ambush(self, nemesis: Nemesis, rng: Random) -> None:
        pace = rng.choice((0.2, 0.5, 1.0))
        while True:
            await asyncio.sleep(rng.expovariate(1 / pace))
            await hold_up(self.world, rng, nemesis, LAYOUT_STEPS, self._come)

    async def audit(self) -> bool:
        if not await super().audit():
            return False
        await self._until_pruned()
        return True

    async def _until_pruned(self) -> None:
        """Everything was read: what is sealed goes."""
        admin = Administrator(self.world, "cleaner", Random(self.rng.random()))
        task = self.world.spawn(admin.node, self._forget(admin), "cleaner")
        await asyncio.wait([task])
        task.result()
        for _second in range(int(HEALING)):
            if not self._sealed():
                break
            await asyncio.sleep(1.0)
        for text in self._sealed():
            self.history.remark(text)
        self.history.add("world", "info", "left", {"sealed segments that everybody has read": len(self._sealed())})

    async def _forget(self, admin: Administrator) -> None:
        """Remove the administrator's subscriptions: nobody reads those of which it does not know that it made them."""
        topic = self.topics[0]
        for name in subscriptions_of(self.world.engine.tables.rows, topic):
            if name.startswith(EXTRA):
                await admin.until_done(
                    topic, "unsubscribe", [name], lambda controller, name=name: controller.delete_subscription(name)
                )

    def _sealed(self) -> list[str]:
        records = topic_records(self.world.engine.tables.rows)
        return [
            f"{topic}: segment {number} is {each.state}"
            for topic in self.topics
            for number, each in sorted(records[topic].segments.items())
            if each.state != "ACTIVE"
        ] + [f"{topic}: {records[topic].pending_operation}" for topic in self.topics if records[topic].pending_operation]

    def judge(self) -> list[Violation]:
        events = self.history.events
        whole = [KEEPER, ORDERED, *(each for each in self.streams if each.endswith("earliest"))]
        return [
            *super().judge(),
            *begins_where_asked(events, prefix="new-"),
            *nothing_skipped(events, ordered=whole, start_ms=START_MS),
        ]

    def ordered(self) -> list[str]:
        return [*super().ordered(), *self.streams]
