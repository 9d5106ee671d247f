"""The workloads with transactions under an administrator who does not wait: W11 (a bank) and W12 (lists beside seeks).

W11 is W5 with a layout that changes two or three times a second beside every fault of a transaction. W12 is W4 with a
subscription that is sought and cleared all the time while transactions write into its topic and acknowledge in it: what a
transaction held before a reset is gone with it, and nothing that counts may be missing after it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from braid.client import Client, Message
from braid.errors import BraidError
from braid.runtime.env import Random
from braid.testing.sim import checkers
from braid.testing.sim.administrators import Administrator, Churn
from braid.testing.sim.checkers import Violation
from braid.testing.sim.faults import Nemesis
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.messaging import KEEPER
from braid.testing.sim.plan_faults import LAYOUT_STEPS, RESET_STEPS, hold_up
from braid.testing.sim.ports import START_MS
from braid.testing.sim.processes import read_payload
from braid.testing.sim.scalable_processes import StreamProcess
from braid.testing.sim.skipped import nothing_skipped
from braid.testing.sim.transactions import AGAIN, ORDERED, SOUGHT, Bank, ListAppend
from braid.testing.sim.txn_checkers import settled
from braid.testing.sim.txn_faults import LATE_STEPS
from braid.testing.sim.txn_processes import Habits, TxnProcess
from braid.testing.sim.world import World

JOINERS = 3
"""Consumers that join a subscription in the middle of its resets, at most."""


class QuickBank(Bank):
    """W11: a bank on topics whose layout changes faster than a broker learns that it owns them no more."""

    churn_pace = (0.3, 0.5, 0.8)
    is_always_scalable = True


class Seeker(Churn):
    """An administrator who does nothing but seek and clear one subscription of one topic."""

    async def _act(self, topic: str) -> None:
        await self._reset(topic, SOUGHT)


class Taker(TxnProcess):
    """Reads a topic in order and acknowledges each batch in a transaction of its own; writes nothing.

    After a transaction that was not committed for certain it begins anew where its subscription stands."""

    def __init__(self, world: World, name: str, rng: Random, topic: str, subscription: str, habits: Habits) -> None:
        super().__init__(world, name, rng, habits)
        self.topic = topic
        self.subscription = subscription
        self.last_message = 0.0
        self._batch = rng.choice((1, 3, 8))

    async def work(self, client: Client) -> None:
        where = [self.topic, self.subscription]
        number = self.world.history.invoke(self.name, "subscribe", where)
        consumer = await client.stream_consumer(self.topic, self.subscription, name=self.name, initial="earliest")
        self.note("ok", "subscribe", where, number=number, epoch=self.incarnation)
        while True:
            messages = await consumer.receive_batch(self._batch, timeout=1.0)
            if not messages:
                if self.is_stopping:
                    break
                continue
            self.last_message = self.world.loop.time()
            for message in messages:
                self.note("ok", "deliver", self._value(message, more=True), segment=message.id.segment_id)
            if not await self._one(client, consumer, messages):
                return
        self.is_done = True

    def _value(self, message: Message, *, more: bool = False) -> list[Any]:
        value = [self.topic, self.subscription, *read_payload(message), str(message.id)]
        return [*value, message.redelivery_count] if more else value

    async def _one(self, client: Client, consumer: Any, messages: list[Message]) -> bool:
        txn, timeout = await self.begin(client)
        try:
            await self.maybe_linger(timeout)
            last: dict[int, Message] = {message.id.segment_id: message for message in messages}
            for message in last.values():
                await self.acknowledge(consumer.acknowledge_cumulative, self._value(message), message, txn)
            return await self.finish(txn)
        except BraidError:
            await self.end(txn, "abort")
            raise


class SoughtLists(ListAppend):
    """W12: lists, a pipeline, and a subscription of the log that is sought beside them, read in and out of transactions."""

    churn_pace = (0.4, 0.8, 2.0)
    is_always_scalable = True
    late_steps = (*LATE_STEPS, ("txn-materialise:aborted", "before"))

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.seeker: Seeker
        self.joiners = JOINERS

    def churned(self) -> list[str]:
        return [*self.topics, *[self.log] * 4]

    async def _make_topics(self, admin: Administrator) -> None:
        await super()._make_topics(admin)
        await admin.subscribe(self.log, SOUGHT)

    def add_processes(self) -> None:
        super().add_processes()
        rng, world = self.rng, self.world
        for number in range(rng.choice((1, 2))):
            self.processes.append(Taker(world, f"t{number}", Random(rng.random()), self.log, SOUGHT, self.habits))
        leaves = rng.choice((0.0, 0.2))
        self.processes.append(StreamProcess(world, "s0", self.log, SOUGHT, Random(rng.random()), every=3, leaves=leaves))
        self.seeker = Seeker(world, "seeker", Random(rng.random()), [self.log], pace=rng.choice((0.6, 1.5, 3.0)))
        self.seeker.start()

    async def disturb(self, nemesis: Nemesis) -> None:
        ambush = asyncio.get_running_loop().create_task(self._delay(nemesis, Random(self.rng.random())))
        await super().disturb(nemesis)
        ambush.cancel()
        await asyncio.wait([ambush])

    async def _delay(self, nemesis: Nemesis, rng: Random) -> None:
        """Resets take their time, and so do splits and merges."""
        steps = rng.choice((RESET_STEPS, RESET_STEPS, (*RESET_STEPS, *LAYOUT_STEPS)))
        while True:
            await asyncio.sleep(rng.expovariate(2.0))
            await hold_up(self.world, rng, nemesis, steps, self._join)

    def _join(self) -> None:
        """Somebody joins the subscription while it is being reset."""
        if self.joiners:
            self.joiners -= 1
            joiner = StreamProcess(self.world, f"j{self.joiners}", self.log, SOUGHT, Random(self.rng.random()), every=3)
            self.processes.append(joiner)
            joiner.start()

    async def finish(self) -> None:
        self.seeker.is_stopping = True
        await self.settle("seeker", [self.seeker])
        await super().finish()

    def judge(self) -> list[Violation]:
        counted = settled(self.history.events)
        return [
            *super().judge(),
            *checkers.begun_anew(counted, subscription=SOUGHT, start_ms=START_MS),
            *nothing_skipped(counted, ordered=[KEEPER, AGAIN, ORDERED, SOUGHT], start_ms=START_MS),
        ]
