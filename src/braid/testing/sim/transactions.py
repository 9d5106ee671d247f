"""The workloads with transactions: W4 (lists that transactions append to, a pipeline) and W5 (a bank).

Odd seeds use scalable topics whose layout never rests (as W6), even ones regular topics. Phases as in `messaging.py`; in the
end everything is read twice: as soon as nothing is under way, and again after every transaction was collected and every broker
was started anew, when nothing but the records of the logs can say what is to be seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, Final

from braid.client import Client
from braid.errors import DeadlineExceeded
from braid.runtime.env import Random
from braid.testing.sim import checkers, dag_checkers, faults, txn_checkers
from braid.testing.sim.administrators import Administrator, Churn
from braid.testing.sim.checkers import Violation
from braid.testing.sim.faults import Nemesis
from braid.testing.sim.history import Event
from braid.testing.sim.isolation import isolation
from braid.testing.sim.layouts import outside
from braid.testing.sim.loop import Node, SimLoop
from braid.testing.sim.messaging import BOUNDS, FAULTS, HEALING, KEEPER, Messaging
from braid.testing.sim.processes import read_payload
from braid.testing.sim.scalable_processes import LaneProducer, QueueProcess, StreamProcess
from braid.testing.sim.txn_faults import LATE_STEPS, strike
from braid.testing.sim.txn_notes import left_of_transactions
from braid.testing.sim.txn_processes import (
    PEACEFUL,
    STATE,
    Habits,
    ListWorker,
    Pipeline,
    Teller,
    TokenWorker,
    TxnProcess,
    name_and_content,
)

AGAIN: Final = "keeper-again"
"""Read after everything was collected and restarted."""
ORDERED: Final = "ordered"
SOUGHT: Final = "sought"
ORIGIN: Final = "origin"
"""Who made the first version of each token."""
DEADLINE_SPARE: Final = 20.0
"""Seconds after its deadline by which a transaction is aborted, in peace."""
PATIENCE: Final = 8.0
"""Seconds after which an audit takes it that nothing more comes."""
MONEY: Final = 100
"""In each account at the beginning."""
TXN_BOUNDS: Final = {**BOUNDS, "begin": 40.0, "commit": 120.0, "abort": 120.0}
"""A commit waits for the acknowledgments made under it, which wait for their consumers."""


class Transactional(Messaging):
    """What the workloads with transactions share."""

    broker_counts = (1, 2, 2, 3, 3)
    churn_pace: tuple[float, ...] = (2.0, 5.0, 10.0)
    is_always_scalable = False
    late_steps: Sequence[tuple[str, str]] = LATE_STEPS

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng, deduplication=rng.random() < 0.5)
        self.is_scalable = self.is_always_scalable or seed % 2 == 1
        self.possible = (*FAULTS, *faults.TRANSACTIONS, *(faults.LEADERS if self.is_scalable else ()))
        self.seconds = rng.uniform(8.0, 20.0)
        self.peace = rng.choice((0.0, 3.0))
        self.states = [self._name(f"state-{number}") for number in range(2)]
        """Topics of tokens."""
        self.topics = list(self.states)
        self.churn: Churn | None = None
        self.habits = rng.choice((Habits(), Habits(abort=0.3), Habits(vanish=0.2, linger=0.15), Habits(0.05, 0.0, 0.0)))

    def _name(self, name: str) -> str:
        return f"{'topic' if self.is_scalable else 'persistent'}://public/default/{name}"

    def tokens(self) -> dict[str, str]:
        """The first version of each."""
        raise NotImplementedError

    # Phases

    async def prepare(self) -> None:
        admin = Administrator(self.world, "admin", Random(self.rng.random()))
        churn_random = Random(self.rng.random())
        pace = self.rng.choice(self.churn_pace)
        if self.is_scalable:
            task = self.world.spawn(admin.node, self._make_topics(admin), "admin")
            await asyncio.wait([task])
            task.result()
        await self.on_node(ORIGIN, self._make_tokens)
        if self.is_scalable:
            self.churn = Churn(self.world, "churn", churn_random, self.churned(), pace=pace)
            self.churn.start()

    def churned(self) -> list[str]:
        """Topics whose layout changes; one that is named twice changes twice as often."""
        return self.topics

    async def _make_topics(self, admin: Administrator) -> None:
        for topic in self.topics:
            await admin.create(topic, self.rng.choice((1, 2)))

    async def _make_tokens(self, client: Client) -> None:
        """In peace; raises what goes wrong."""
        for topic in self.topics:
            for subscription in (KEEPER, AGAIN):
                consumer = await client.stream_consumer(topic, subscription, name=ORIGIN, initial="earliest")
                self.history.add(ORIGIN, "ok", "subscribe", [topic, subscription])
                await consumer.close()
        for topic in self.states:
            queue = await client.queue_consumer(topic, STATE, name=ORIGIN, initial="earliest")
            self.history.add(ORIGIN, "ok", "subscribe", [topic, STATE])
            await queue.close()
        producers = [await client.producer(topic, name=ORIGIN) for topic in self.states]
        for number, (name, content) in enumerate(self.tokens().items()):
            topic = self.states[number % len(self.states)]
            value = [topic, ORIGIN, name, number]
            count = self.history.invoke(ORIGIN, "send", value)
            place = await producers[number % len(producers)].send(f"{ORIGIN}/{name}/{number}/{content}".encode(), key=name)
            self.history.add(ORIGIN, "ok", "send", [*value, str(place)], number=count)

    async def disturb(self, nemesis: Nemesis) -> None:
        ambush = asyncio.get_running_loop().create_task(self._ambush(nemesis, Random(self.rng.random())))
        await super().disturb(nemesis)
        ambush.cancel()
        await asyncio.wait([ambush])

    async def _ambush(self, nemesis: Nemesis, rng: Random) -> None:
        """Besides what happens by chance: something at a step of a transaction."""
        pace = rng.choice((0.5, 0.5, 1.5, 1e9))

        def nodes() -> list[Node]:
            return [each.node for each in self.processes if isinstance(each, TxnProcess)]

        while True:
            await asyncio.sleep(rng.expovariate(1 / pace))
            await strike(self.world, rng, nemesis, nodes, self.late_steps)

    async def finish(self) -> None:
        if self.churn is not None:
            self.churn.is_stopping = True
            await self.settle("administrator", [self.churn])
        for process in self.processes:
            if isinstance(process, TxnProcess):
                process.habits = PEACEFUL
        await self.settle("producers", [each for each in self.processes if isinstance(each, LaneProducer)])
        await self.settle("workers", [each for each in self.processes if isinstance(each, TokenWorker)])

    async def audit(self) -> bool:
        if not (await self.on_node(STATE, self._take_tokens) and await self.on_node(KEEPER, self._audit_first)):
            return False
        await self._collected()
        for broker in list(self.world.brokers):
            await self.world.restart(broker.number)
        await self.world.settle()
        if not await self.on_node(AGAIN, self._audit_again):
            return False
        await self._quiet()
        return True

    async def _take_tokens(self, client: Client) -> None:
        """What is left in the workers' subscription: one token of each thing."""
        await _together([self._take_from(client, topic) for topic in self.states])

    async def _take_from(self, client: Client, topic: str) -> None:
        self.history.invoke(STATE, "subscribe", [topic, STATE])
        consumer = await client.queue_consumer(topic, STATE, name="last", initial="earliest")
        while True:
            try:
                message = await consumer.receive(timeout=PATIENCE)
            except DeadlineExceeded:
                break
            value = [topic, STATE, *read_payload(message), str(message.id)]
            self.history.add(STATE, "ok", "deliver", [*value, message.redelivery_count])
            self.history.add(STATE, "info", "token", list(name_and_content(message)))
            await consumer.acknowledge(message, wait=True)
            self.history.add(STATE, "ok", "ack", value)
        await consumer.close()

    async def _audit_first(self, client: Client) -> None:
        await _together([self._read_topic(client, topic, KEEPER) for topic in self.topics])
        for topic, name, _kind in () if self.churn is None else self.churn.made:
            self.history.add("world", "info", "unsubscribe", [topic, name])  # nobody looks what it holds

    async def _audit_again(self, client: Client) -> None:
        await _together([self._read_topic(client, topic, AGAIN) for topic in self.topics])

    async def _read_topic(self, client: Client, topic: str, reader: str) -> None:
        """Everything a subscription holds, acknowledged on the way: children come when their parents are drained."""
        self.history.add(reader, "ok", "audit", [topic, reader])
        consumer = await client.stream_consumer(topic, reader, name=f"audit-{reader}", initial="earliest")
        while True:
            try:
                message = await consumer.receive(timeout=PATIENCE)
            except DeadlineExceeded:
                break
            value = [topic, reader, *read_payload(message), str(message.id), message.redelivery_count]
            self.history.add(reader, "ok", "deliver", value, segment=message.id.segment_id)
            self.seen(topic, reader, value[2:5], name_and_content(message)[1])
            await consumer.acknowledge_cumulative(message)
        self.history.add(reader, "ok", "audited", [topic, reader])
        await consumer.close()

    def seen(self, topic: str, reader: str, message: list[Any], content: str) -> None:
        """An audit came across this; perhaps not for the first time, if the owner it read from was not the owner any more."""

    async def _collected(self) -> None:
        """Wait until nothing is left of any transaction; what then is left stays so."""
        for _second in range(int(HEALING)):
            if not any(left_of_transactions(self.world.engine.tables.rows).values()) and not any(self._held().values()):
                break
            await asyncio.sleep(1.0)
        left = left_of_transactions(self.world.engine.tables.rows)
        for what, names in left.items():
            if names:
                self.history.remark(f"{what}: {names}")
        self.history.add("world", "info", "left", {**{what: len(names) for what, names in left.items()}, **self._held()})

    def _held(self) -> dict[str, int]:
        """What brokers keep in memory of transactions."""
        services = [broker.service for broker in self.world.brokers]
        topics = [topic for service in services for topic in service.topics.values()]
        acks = [each.pending_acks for topic in topics for each in topic.subscriptions.values()]
        return {
            "held transactions": sum(service.transactions.decisions.held for service in services),
            "open transactions of topics": sum(len(topic.transactions.open_transactions()) for topic in topics),
            "held acknowledgments": sum(len(each.transactions()) for each in acks if each is not None),
        }

    async def _quiet(self) -> None:
        """Wait until no operation is pending and the sessions of the brokers before the restart are over."""
        for _second in range(int(HEALING)):
            is_over = len(self.world.engine._leases) <= len(self.world.brokers)
            if is_over and not any(outside(self.world.engine.tables.rows).values()):
                return
            await asyncio.sleep(1.0)

    def left_over(self) -> dict[str, int]:
        found = {**outside(self.world.engine.tables.rows), **left_of_transactions(self.world.engine.tables.rows)}
        for what, names in found.items():
            if names:
                self.history.remark(f"{what}: {names}")
        return {what: len(names) for what, names in found.items()}

    # The verdict

    def judge(self) -> list[Violation]:
        events = self.history.events
        counted = txn_checkers.settled(events)
        is_complete = any(event.op == "audited" and event.value[1] == AGAIN for event in events)
        return [
            *txn_checkers.one_outcome(events),
            *txn_checkers.all_or_nothing(events),
            *txn_checkers.consumed_once(events, subscriptions=[STATE], is_finished=is_complete),
            *txn_checkers.late_writes(events),
            *txn_checkers.op_first(events),
            *txn_checkers.ended_in_time(events, spare=DEADLINE_SPARE),
            *self.judge_tokens(events),
            *checkers.no_loss(counted),
            *checkers.no_phantom(counted),
            *checkers.key_order(counted, ordered=[KEEPER, AGAIN, ORDERED]),
            *dag_checkers.drained_first(events, ordered=[KEEPER, AGAIN, ORDERED, SOUGHT]),
            *dag_checkers.dag(events),
            *dag_checkers.intent_first(events),
            *dag_checkers.leader_terms(events),
            *dag_checkers.stale_calls(events),
            *checkers.single_writer(events),
            *checkers.terms_grow(events),
            *checkers.bounded_wait(events, bounds=TXN_BOUNDS, healing=4 * HEALING),
            *checkers.nothing_left(events),
        ]

    def judge_tokens(self, events: list[Event]) -> list[Violation]:
        """One of each is left; what else is to be said of them the workload knows."""
        if not any(event.op == "audited" for event in events):
            return []
        names = [event.value[0] for event in events if event.op == "token"]
        return [
            Violation("C6", f"{names.count(name)} tokens of {name} are left over, there is to be one") for name in self.tokens()
            if names.count(name) != 1
        ]  # fmt: skip


class ListAppend(Transactional):
    """W4: transactions append to several lists in several topics and take what they read; a pipeline copies a topic; readers
    look on. Some clients crash, vanish or wake up too late."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        super().__init__(seed, loop, rng)
        self.log, self.source, self.target = map(self._name, ("log", "in", "out"))
        self.topics = [*self.states, self.log, self.source, self.target]

    def tokens(self) -> dict[str, str]:
        return {f"list-{number}": "" for number in range(5)}

    def add_processes(self) -> None:
        rng, world = self.rng, self.world
        for number in range(rng.choice((2, 3))):
            self.processes.append(
                ListWorker(
                    world,
                    f"w{number}",
                    Random(rng.random()),
                    self.states,
                    [self.log],
                    total=rng.choice((6, 10, 14)),
                    pace=self.seconds / 20,
                    habits=self.habits,
                )
            )
        total = rng.choice((20, 30))
        self.processes.append(
            LaneProducer(world, "p0", self.source, Random(rng.random()), total, keys=6, seconds=self.load_seconds())
        )
        for number in range(rng.choice((1, 2))):
            self.processes.append(Pipeline(world, f"x{number}", Random(rng.random()), self.source, self.target, self.habits))
        self.processes.append(StreamProcess(world, "r0", self.log, ORDERED, Random(rng.random()), every=4))
        if rng.random() < 0.5:
            self.processes.append(QueueProcess(world, "q0", self.target, "workers", Random(rng.random()), nacks=0.05))

    def seen(self, topic: str, reader: str, message: list[Any], content: str) -> None:
        if topic in self.states:
            self.history.add(reader, "ok", "list-read", [message[1], [each for each in content.split(",") if each]])
        elif topic == self.target:
            self.history.add(reader, "ok", "copied", [reader, content, message])

    def judge_tokens(self, events: list[Event]) -> list[Violation]:
        return [*super().judge_tokens(events), *isolation(events), *self._copies(events)]

    def _copies(self, events: list[Event]) -> list[Violation]:
        """C6 and C3: the pipeline's target holds each message of its source once."""
        sent = {f"{each.value[1]}.{each.value[3]}": each.kind for each in events if _is_sent(each, self.source)}
        found = []
        for reader in (KEEPER, AGAIN):
            if not any(each.op == "audited" and each.value == [self.target, reader] for each in events):
                continue
            seen = {tuple(each.value[2]): each.value[1] for each in events if each.op == "copied" and each.value[0] == reader}
            copies = list(seen.values())
            for name in dict.fromkeys((*sent, *copies)):
                count = copies.count(name)
                if count > 1 or (count == 0 and sent.get(name) == "ok"):
                    found.append(Violation("C6", f"{reader} saw {count} copies of {name} in {self.target}, there is to be one"))
        return found


class Bank(Transactional):
    """W5: accounts that exchange money by transactions; whoever counts all of them, in one transaction, counts the same."""

    def tokens(self) -> dict[str, str]:
        return {f"account-{number}": str(MONEY) for number in range(4)}

    def add_processes(self) -> None:
        rng = self.rng
        for number in range(rng.choice((2, 3))):
            teller = Teller(
                self.world,
                f"t{number}",
                Random(rng.random()),
                self.states,
                [],
                total=rng.choice((10, 16, 24)),
                pace=self.seconds / 40,
                habits=self.habits,
            )
            teller.accounts = len(self.tokens())
            teller.counts = (0.5, 0.2, 0.0)[number]
            self.processes.append(teller)

    def judge_tokens(self, events: list[Event]) -> list[Violation]:
        return [*super().judge_tokens(events), *totals(events, total=MONEY * len(self.tokens()))]


def totals(events: list[Event], *, total: int) -> list[Violation]:
    """C6: every count of all accounts by a transaction that held them all, and the last one, has the same sum."""
    held: dict[str, int] = {}
    for event in events:
        if event.op == "ack" and event.kind == "ok" and event.txn:
            held[event.txn] = held.get(event.txn, 0) + 1
    found = [
        Violation("C6", f"{event.proc} counted {event.value} in {event.txn}: {sum(event.value.values())}")
        for event in events
        if event.op == "counted" and held.get(event.txn, 0) >= len(event.value) and sum(event.value.values()) != total
    ]
    last = {event.value[0]: int(event.value[1]) for event in events if event.op == "token"}
    if last and sum(last.values()) != total:
        found.append(Violation("C6", f"in the end there are {last}: {sum(last.values())} instead of {total}"))
    return found


async def _together(works: list[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for work in works:
            group.create_task(work)


def _is_sent(event: Event, topic: str) -> bool:
    return event.op == "send" and event.value[0] == topic
