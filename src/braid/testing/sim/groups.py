"""W14: checkpoint groups whose members join, leave, crash and come back while the layout changes.

While its members live each message is handed out once in a group, whoever joins or leaves; what a member had that crashed, or
that was away for longer than its grace period, comes again; nothing is ever missed. The checkers of that are here too: pure
functions from events to violations.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from braid.client import Client
from braid.client.messages import EARLIEST, LATEST
from braid.errors import BraidError
from braid.runtime.env import Random
from braid.testing.sim.checkers import MessageKey, Violation
from braid.testing.sim.history import Event
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.scalable_processes import Reader
from braid.testing.sim.scalable_topics import ScalableMessaging
from braid.testing.sim.world import SCALABLE, World

GROUP = "group"
FOUNDER = "founder"
GRACE_SECONDS = SCALABLE.consumer_grace_seconds


class GroupMember(Reader):
    """Reads its share, takes a checkpoint now and then, and leaves as often as it likes."""

    def __init__(self, world: World, name: str, topic: str, group: str, rng: Random, *, leaves: float) -> None:
        super().__init__(world, name, topic, group, rng)
        self._leaves = leaves
        self._span = rng.choice((3, 10, 40))

    async def work(self, client: Client) -> None:
        where = [self.topic, self.subscription]
        start = self._rng.choice((EARLIEST, LATEST, LATEST))  # the group knows better
        number = self.world.history.invoke(self.name, "join", where)
        try:
            consumer = await client.checkpoint_consumer(self.topic, start=start, group=self.subscription, name=self.name)
            self.note("ok", "join", where, number=number)
            await self._read(consumer)
            number, began = self.world.history.invoke(self.name, "leave", where), self.world.loop.time()
            await consumer.close()
            if self.world.loop.time() - began >= client.config.operation_timeout:
                self.note("info", "lost", where)  # nobody took its places in time
            self.note("ok", "leave", where, number=number)
        except BraidError:
            self.note("info", "lost", where)
            raise

    async def _read(self, consumer: Any) -> None:
        while True:
            message = await self.receive(consumer)
            if message is None and self.is_stopping:
                self.is_done = True
                return
            if message is not None and self._rng.random() < 1 / self._span:
                consumer.checkpoint()
            if message is not None and not self.is_stopping and self._rng.random() < self._leaves:
                return


class Groups(ScalableMessaging):
    """See the module."""

    churn_pace = (0.5, 1.0, 2.0)

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.topics = self.topics[:1]
        self.peace = rng.choice((3.0, 6.0))

    async def prepare(self) -> None:
        await super().prepare()
        await self.on_node(FOUNDER, self._found)

    async def _found(self, client: Client) -> None:
        """In peace: the group begins with the first message."""
        topic = self.topics[0]
        for group in self.groups():
            consumer = await client.checkpoint_consumer(topic, start=EARLIEST, group=group, name=FOUNDER)
            await consumer.close()
            self.history.add(FOUNDER, "ok", "subscribe", [topic, group])

    def groups(self) -> list[str]:
        return [f"{GROUP}-{number}" for number in range(2)]

    def add_processes(self) -> None:
        rng, topic = self.rng, self.topics[0]
        self.add_producers()
        for number, group in enumerate(self.groups()):
            for each in range(rng.choice((2, 3, 4))):
                leaves = rng.choice((0.0, 0.05, 0.2))
                member = GroupMember(self.world, f"g{number}{each}", topic, group, Random(rng.random()), leaves=leaves)
                member.delay = rng.choice((0.0, rng.uniform(0.0, self.peace + self.seconds)))
                self.processes.append(member)

    def judge(self) -> list[Violation]:
        return [*super().judge(), *handed_out_once(self.history.events, groups=self.groups())]


def handed_out_once(events: Sequence[Event], *, groups: Sequence[str], grace: float = GRACE_SECONDS) -> list[Violation]:
    """C3 in groups: a message comes a second time only if one of the two members crashed, failed, or was given up by the leader
    before: one that was away for too long still has what it received. `join`, `leave` and `lost` [topic, group] of a member,
    `unregistered` [topic, group, member]. One that leaves and is unregistered much later was given up, too."""
    wanted = set(groups)
    life: dict[str, int] = defaultdict(int)
    ended = _given_up(events)
    leaving: dict[str, float] = {}
    holder: dict[tuple[str, MessageKey], tuple[str, int, float]] = {}
    found = []
    for event in events:
        if event.op == "join" and event.kind == "invoke":
            life[event.proc] += 1
            leaving.pop(event.proc, None)
        elif event.op == "leave" and event.kind == "invoke":
            leaving[event.proc] = event.t
        elif event.op in ("crash", "lost"):
            ended.add((event.proc, life[event.proc]))
        elif event.op == "unregistered" and event.t > leaving.get(event.value[2], -grace) + grace:
            ended.add((event.value[2], life[event.value[2]]))
        elif event.op == "deliver" and event.value[1] in wanted:
            topic, group, producer, key, sequence = event.value[:5]
            at = (group, (topic, producer, key, sequence))
            if at in holder and holder[at][:2] not in ended and (event.proc, life[event.proc]) not in ended:
                found.append(
                    Violation(
                        "C3",
                        f"{at[1]} was handed out in {group} at {holder[at][2]} to {holder[at][0]}, which lived on, and again "
                        f"at {event.t} to {event.proc}",
                    )
                )
            holder[at] = (event.proc, life[event.proc], event.t)
    return found


def _given_up(events: Sequence[Event]) -> set[tuple[str, int]]:
    """Lives of members that were unregistered more than once: given up first, even if they were just about to leave."""
    life: dict[str, int] = defaultdict(int)
    times: dict[tuple[str, int], int] = defaultdict(int)
    for event in events:
        if event.op == "join" and event.kind == "invoke":
            life[event.proc] += 1
        elif event.op == "unregistered":
            times[event.value[2], life[event.value[2]]] += 1
    return {each for each, count in times.items() if count > 1}
