"""The late-write table: a transactional write or acknowledgment is held up at each point of its way while its transaction is
committed, aborted or times out, its topic stays or moves to another broker, and its header is still there or collected.

Each test is one combination and holds up every point at once, each on topics and in transactions of its own. Judged are the
reply, what can be read, and the records left: right after the late one went on, after a restart of everything, and once more
after the collection of finished transactions and another restart.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import pytest
from tests.e2e.txn_cluster import (
    LONG_SECONDS,
    RETENTION_SECONDS,
    SETTLE_SECONDS,
    TXN_SECONDS,
    Hold,
    TxnCluster,
    abort,
    ack,
    begin,
    commit,
    retried,
    send,
    sent,
    topic_log,
)

from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.plans import watching
from braid.testing.raw_client import RawClient, id_of, is_reply_to, metadata_of, payload_of, position_of
from braid.wire.client import Delivery
from braid.wire.commands import Command
from braid.wire.messages import MessageIdData
from braid.wire.types import CommandType, InitialPosition, SubType

Outcome = Literal["commit", "abort", "timeout"]
Moment = Literal["stays", "decided, then moves", "moves, then decided", "moves, decided after the zombie woke"]
CONFLICT = "error 23"
NOT_READY = "error 6"
OUTWARD, BACKWARD = "append - store", "store - receipt"
WRITE_POINTS = {
    "before op": "txn-write:op",
    "op - header": "txn-write:header",
    "header - append": "txn-write:append",
    OUTWARD: "outward",
    BACKWARD: "backward",
}
"""Where a write is held up: the step it stands before, or the way of the append that is held up in the ledger store. An append
under way when its log is taken over may or may not have reached the store: both are tried."""
ACK_POINTS = {
    "before op": "txn-ack:op",
    "op - header": "txn-ack:header",
    "header - owner": "txn-ack:owner",
    "owner - answer": "txn-ack:hold",
}
READER = MessageIdData(ledgerId=(1 << 64) - 1, entryId=(1 << 64) - 1)
OLD, NEW = 0, 1
"""The broker that has the topics first, and the one that gets them."""

MOMENTS: list[tuple[Moment, bool]] = [
    ("stays", False),
    ("stays", True),
    ("decided, then moves", False),
    ("decided, then moves", True),
    ("moves, then decided", False),
    ("moves, then decided", True),
    ("moves, decided after the zombie woke", False),
]
table = pytest.mark.parametrize(
    ("moment", "is_collected"),
    [pytest.param(*each, id=f"{each[0]}-{'collected' if each[1] else 'present'}") for each in MOMENTS],
)
outcomes = pytest.mark.parametrize("outcome", ["commit", "abort", "timeout"])


class Lane(msgspec.Struct, kw_only=True):
    """One topic with one transaction and one late operation."""

    number: int
    point: str
    shape: str
    """Of writes: `warm` (the transaction wrote here before) or `cold`; of acknowledgments also `cumulative` and `batch`."""
    topic: str
    txn: TxnId = TxnId(0, 0)
    request: int = 0
    reply: str = ""

    @property
    def is_warm(self) -> bool:
        return self.shape == "warm"

    def __str__(self) -> str:
        return f"[{self.point}, {self.shape}]"


class Table:
    """What writes and acknowledgments have in common."""

    points: dict[str, str]
    shapes: tuple[str, ...]

    def __init__(self, cluster: TxnCluster, hold: Hold, outcome: Outcome, moment: Moment, is_collected: bool) -> None:
        self.cluster = cluster
        self.hold = hold
        self.outcome = outcome
        self.moment = moment
        self.is_collected = is_collected
        self.is_moved = moment != "stays"
        self.wrong: list[str] = []
        self.lanes = [
            Lane(number=number, point=point, shape=shape, topic=f"persistent://public/default/lane-{number}")
            for number, (point, shape) in enumerate((point, shape) for point in self.points for shape in self.shapes)
        ]
        self.old: RawClient
        """Connected to the old owner, whose operations are late."""
        self.other: RawClient
        """Connected to the other broker, which decides, and has the topics after a move."""

    def check(self, lane: Lane, what: str, found: Any, *allowed: Any) -> None:
        if found not in allowed:
            self.wrong.append(f"{lane} {what}: {found}, expected {' or '.join(map(str, allowed))}")

    async def run(self) -> None:
        cluster = self.cluster
        self.old, self.other = await cluster.client(OLD), await cluster.client(NEW)
        await cluster.take(self.old, self.lanes[0].topic)
        seconds = TXN_SECONDS if self.outcome == "timeout" else LONG_SECONDS
        for lane in self.lanes:
            lane.txn = await begin(self.other, seconds, coordinator=lane.number % 4)
        for lane in self.lanes:
            await self.prepare(lane)
        for lane in self.lanes:
            await self.begin_late(lane)
        if self.moment == "stays":
            await self.decide()
        elif self.moment == "decided, then moves":
            await self.decide()
            await self.move()
        else:
            await self.move()
            if self.moment == "moves, then decided":
                await self.decide()
        if self.moment != "moves, decided after the zombie woke":
            await self.check_headers()
            await self.judge_while_held()
        await self.resume()
        if self.moment == "moves, decided after the zombie woke":
            await self.decide()
            await cluster.advance(SETTLE_SECONDS)
        for lane in self.lanes:
            lane.reply = self.reply(lane)
            self.judge_reply(lane)
        await self.finish(NEW if self.is_moved else OLD)
        await self.judge(NEW if self.is_moved else OLD, "afterwards")
        if not (self.is_moved and self.moment == "moves, decided after the zombie woke"):
            self.check_ops("afterwards")
        number = await cluster.restart()
        await self.judge(number, "after the restart")
        self.check_ops("after the restart")
        await cluster.advance(RETENTION_SECONDS + SETTLE_SECONDS)
        if cluster.headers():
            self.wrong.append(f"after the collection headers are left: {cluster.headers()}")
        self.check_ops("after the collection")
        await self.judge(await cluster.restart(), "after collection and restart")
        assert self.wrong == [], "\n".join(["", *self.wrong])

    def check_ops(self, when: str) -> None:
        if left := self.cluster.ops():
            self.wrong.append(f"{when} ops are left: {left}")

    async def decide(self) -> None:
        if self.outcome == "timeout":
            await self.cluster.advance(TXN_SECONDS + SETTLE_SECONDS)
        for lane in self.lanes:
            if self.outcome != "timeout":
                await (commit if self.outcome == "commit" else abort)(self.other, lane.txn)
        await self.cluster.advance(1.5)  # the outcome is known to all who hold anything of it

    async def move(self) -> None:
        """The old owner stands still, its session runs out, the other one takes over."""
        await self.cluster.move(OLD, self.other, self.lanes[0].topic)
        for lane in self.lanes:  # the topics are loaded, and their transactions recovered
            await retried(self.cluster, self.other.producer, lane.topic, 100 + lane.number)
        await self.cluster.advance(1.5)

    async def check_headers(self) -> None:
        if self.is_collected:
            await self.cluster.advance(RETENTION_SECONDS + SETTLE_SECONDS)
        headers = self.cluster.headers()
        state = "COMMITTED" if self.outcome == "commit" else "ABORTED"
        for lane in self.lanes:
            found = "gone" if lane.txn not in headers else headers[lane.txn].state
            self.check(lane, "header while held up", found, *self.header_while_held(lane, state))

    def header_while_held(self, lane: Lane, state: str) -> tuple[str, ...]:
        raise NotImplementedError

    async def resume(self) -> None:
        """What was held up goes on; an owner that lost its topics meanwhile learns of that only later."""
        self.hold.release()
        if self.is_moved:
            self.cluster.wake(OLD)
            await self.cluster.advance(1.0)
            self.cluster.resume(OLD)
        else:
            self.cluster.ledgers.release()
        await self.cluster.advance(SETTLE_SECONDS)

    async def prepare(self, lane: Lane) -> None:
        raise NotImplementedError

    async def begin_late(self, lane: Lane) -> None:
        raise NotImplementedError

    async def judge_while_held(self) -> None:
        """Nothing shows before its time."""

    def reply(self, lane: Lane) -> str:
        raise NotImplementedError

    def judge_reply(self, lane: Lane) -> None:
        raise NotImplementedError

    async def finish(self, number: int) -> None:
        """The last plain operations."""

    async def judge(self, number: int, when: str) -> None:
        raise NotImplementedError


class WriteTable(Table):
    """Topics get `before`, then in the transaction `early` (the warm ones) and `late`, then `after`."""

    points = WRITE_POINTS
    shapes = ("warm", "cold")

    async def prepare(self, lane: Lane) -> None:
        await self.old.producer(lane.topic, lane.number)
        await sent(self.old, b"before", 0, lane.number)
        if lane.is_warm:
            await sent(self.old, b"early", 1, lane.number, lane.txn)

    async def begin_late(self, lane: Lane) -> None:
        step = WRITE_POINTS[lane.point]
        ledgers, log = self.cluster.ledgers, topic_log(lane.topic)
        if lane.point in (OUTWARD, BACKWARD):
            self.hold.off()
            ledgers.hold(log, step)
            count = ledgers.appends[log] + 1
            send(self.old, b"late", 2, lane.number, lane.txn)
            await self.cluster.until(f"{lane} is appended", lambda: ledgers.appends[log] == count)
        else:
            self.hold.at(step)
            send(self.old, b"late", 2, lane.number, lane.txn)
            await self.cluster.until(f"{lane} is held up", lambda: self.hold.arrived == 1)

    def is_stored(self, lane: Lane) -> bool:
        if self.is_moved:
            return lane.point == BACKWARD
        return lane.point in ("header - append", OUTWARD, BACKWARD)

    def header_while_held(self, lane: Lane, state: str) -> tuple[str, ...]:
        """Without a move the op of what is under way holds the header; after one the new owner has dealt with the op."""
        if self.is_collected and (self.is_moved or (lane.point == "before op" and not lane.is_warm)):
            return ("gone",)
        return (state,)

    async def judge_while_held(self) -> None:
        number = NEW if self.is_moved else OLD
        reading = await self._readers(number)
        for lane in self.lanes:
            expected = [b"before"]
            if self.is_moved and self.outcome == "commit":
                expected += self._committed(lane)
            self.check(lane, "read while held up", await reading.settled(lane, expected), expected)
        await reading.close()

    def _committed(self, lane: Lane) -> list[bytes]:
        return [b"early"] * lane.is_warm + [b"late"] * self.is_stored(lane)

    def reply(self, lane: Lane) -> str:
        for event in self.old.inbox:
            if isinstance(event, Command) and getattr(event.body, "producer_id", None) == lane.number:
                if event.type == CommandType.SEND_RECEIPT:
                    return "receipt"
                if event.type == CommandType.SEND_ERROR:
                    return f"error {event.body.error}"
                if event.type == CommandType.CLOSE_PRODUCER:
                    return "closed"
        return "closed" if self.old.is_closed else "none"

    def judge_reply(self, lane: Lane) -> None:
        allowed: tuple[str, ...]
        if self.is_moved:
            # The old owner may close the producer at any time from its waking on.
            allowed = ("receipt", "closed") if lane.point == BACKWARD else (CONFLICT, "closed")
        else:
            allowed = ("receipt",) if self.is_stored(lane) else (CONFLICT,)
        self.check(lane, "reply", lane.reply, *allowed)

    async def finish(self, number: int) -> None:
        client = await self.cluster.client(number)
        for lane in self.lanes:
            await client.producer(lane.topic, lane.number, name="another")
            await sent(client, b"after", 0, lane.number)

    async def judge(self, number: int, when: str) -> None:
        reading = await self._readers(number)
        for lane in self.lanes:
            expected = [b"before", *(self._committed(lane) if self.outcome == "commit" else []), b"after"]
            self.check(lane, f"read {when}", await reading.settled(lane, expected), expected)
            self.check(lane, f"aborted records {when}", self._aborted(lane), *self._aborted_allowed(lane))
        await reading.close()

    def _aborted(self, lane: Lane) -> int:
        found = self.cluster.aborted(lane.topic)
        return -1 if set(found) - {lane.txn} else len(found)

    def _aborted_allowed(self, lane: Lane) -> tuple[int, ...]:
        if self.outcome == "commit":
            return (0,)
        if lane.is_warm or self.is_stored(lane):
            return (1,)
        if not self.is_moved or (lane.point == "before op" and "zombie" not in self.moment):
            return (0,)
        return (0, 1)  # from the op alone nobody can tell whether an entry follows

    async def _readers(self, number: int) -> Reading:
        client = await self.cluster.client(number)
        await self.cluster.take(client, self.lanes[0].topic)
        for lane in self.lanes:
            await retried(
                self.cluster,
                client.subscribe,
                lane.topic,
                f"reader-{lane.number}",
                consumer_id=lane.number,
                durable=False,
                start_message_id=READER,
                permits=100,
            )
        return Reading(self.cluster, client)


class AckTable(Table):
    """Topics have m0 to m4; the transaction acknowledges m0 (the warm ones), and m2 late: alone, with all before it, or one of
    the three messages in it."""

    points = ACK_POINTS
    shapes = ("warm", "cold", "cumulative", "batch")

    async def prepare(self, lane: Lane) -> None:
        await self.old.producer(lane.topic, lane.number)
        await self._subscribe(self.old, lane)
        for number in range(5):
            fields: dict[str, Any] = {}
            if lane.shape == "batch" and number == 2:
                fields["batch"] = [b"x", b"y", b"z"]
            await self.old.store(b"m%d" % number, number, lane.number, **fields)
        got = [await self.old.take(lambda each: isinstance(each, Delivery), "a MESSAGE") for _ in range(5)]
        first, late = position_of(got[0].command.message_id), position_of(got[2].command.message_id)
        if lane.is_warm:
            request = ack(self.old, lane.number, first, lane.txn)
            reply = await self.old.answer(request)
            assert not reply.HasField("error"), reply
        lane.request = late.entry_id
        self._late: dict[int, Position] = {**getattr(self, "_late", {}), lane.number: late}

    async def _subscribe(self, client: RawClient, lane: Lane) -> None:
        kind = SubType.EXCLUSIVE if lane.shape == "cumulative" else SubType.SHARED
        await client.subscribe(lane.topic, "s", kind, lane.number, initial=InitialPosition.EARLIEST, permits=100)

    async def begin_late(self, lane: Lane) -> None:
        self.hold.at(ACK_POINTS[lane.point])
        at = self._late[lane.number]
        named = id_of(at, [0b110]) if lane.shape == "batch" else id_of(at)
        if lane.shape == "batch":
            named.batch_size = 3
        lane.request = ack(self.old, lane.number, named, lane.txn, cumulative=lane.shape == "cumulative")
        await self.cluster.until(f"{lane} is held up", lambda: self.hold.arrived == 1)

    def header_while_held(self, lane: Lane, state: str) -> tuple[str, ...]:
        if not self.is_collected:
            return (state,)
        if self.is_moved or (lane.point == "before op" and not lane.is_warm):
            return ("gone",)
        return (state, "gone")

    async def judge_while_held(self) -> None:
        if self.is_moved:
            await self.judge(NEW, "while held up")

    def reply(self, lane: Lane) -> str:
        for event in self.old.inbox:
            if is_reply_to(lane.request)(event) and isinstance(event, Command):
                return f"error {event.body.error}" if event.body.HasField("error") else "ok"
        for event in self.old.inbox:
            if not isinstance(event, Command) or event.type != CommandType.CLOSE_CONSUMER:
                continue
            if event.body.consumer_id == lane.number:
                return "closed"
        return "closed" if self.old.is_closed else "none"

    def judge_reply(self, lane: Lane) -> None:
        allowed: tuple[str, ...]
        if self.is_moved:
            # A former owner may find out by itself that it is one, before or after it sees the header.
            allowed = ("ok", NOT_READY, "closed") if lane.point == "owner - answer" else (CONFLICT, NOT_READY, "closed")
        elif lane.point == "before op" or lane.point == "op - header":
            allowed = (CONFLICT,)
        else:
            allowed = ("ok",)
        self.check(lane, "reply", lane.reply, *allowed)

    def is_applied(self, lane: Lane) -> bool:
        if self.outcome != "commit":
            return False
        if not self.is_moved:
            return lane.reply == "ok"  # refused has no effect, accepted has
        if "zombie" in self.moment:
            return lane.point == "owner - answer"
        return lane.point != "before op"  # its op was there when the decision was made, and the new owner goes by that

    async def judge(self, number: int, when: str) -> None:
        client = await self.cluster.client(number)
        await self.cluster.take(client, self.lanes[0].topic)
        if number == OLD:
            for lane in self.lanes:
                await self.old.close_consumer(lane.number)
        for lane in self.lanes:
            await retried(self.cluster, self._subscribe, client, lane)
        reading = Reading(self.cluster, client)
        for lane in self.lanes:
            expected = self._open(lane)
            self.check(lane, f"to be acknowledged {when}", await reading.settled(lane, expected), expected)
            self.check(lane, f"aborted records {when}", len(self.cluster.aborted(lane.topic)), 0)
        await reading.close()

    def _open(self, lane: Lane) -> list[bytes]:
        """Payloads still to be acknowledged; a batch as its mask of open messages."""
        found = [b"m0", b"m1", b"111" if lane.shape == "batch" else b"m2", b"m3", b"m4"]
        if self.is_applied(lane):
            if lane.shape == "batch":
                found[2] = b"110"
            elif lane.shape == "cumulative":
                del found[:3]
            else:
                del found[2]
        if lane.is_warm and self.outcome == "commit":
            del found[0]
        return found


class Reading:
    """What consumers of one connection have got, by lane."""

    def __init__(self, cluster: TxnCluster, client: RawClient) -> None:
        self._cluster = cluster
        self._client = client

    async def settled(self, lane: Lane, expected: list[bytes]) -> list[bytes]:
        """What was read when it is what was expected, or else in the end."""
        for _ in range(8):
            await self._client.settle()
            if self._of(lane) == expected:
                break
            await self._cluster.advance(0.5)
        return self._of(lane)

    def _of(self, lane: Lane) -> list[bytes]:
        return [
            _text(each) for each in self._client.inbox if isinstance(each, Delivery) and each.command.consumer_id == lane.number
        ]

    async def close(self) -> None:
        self._client.close()
        await self._cluster.advance(0.5)


def _text(delivery: Delivery) -> bytes:
    if metadata_of(delivery).num_messages_in_batch > 1:
        masks = list(delivery.command.ack_set)
        return b"%s" % f"{masks[0] if masks else 0b111:03b}".encode()
    return payload_of(delivery)


@pytest.mark.req("R473-42", "R473-44", "R473-35")
@pytest.mark.inv("INV10", "INV11", "INV12", "INV13")
@table
@outcomes
async def test_a_late_write(outcome: Outcome, moment: Moment, is_collected: bool) -> None:
    hold = Hold()
    with watching(hold):
        async with TxnCluster() as cluster:
            await WriteTable(cluster, hold, outcome, moment, is_collected).run()


@pytest.mark.req("R473-42", "R473-35")
@pytest.mark.inv("INV10", "INV11", "INV12", "INV14")
@table
@outcomes
async def test_a_late_acknowledgment(outcome: Outcome, moment: Moment, is_collected: bool) -> None:
    hold = Hold()
    with watching(hold):
        async with TxnCluster() as cluster:
            await AckTable(cluster, hold, outcome, moment, is_collected).run()
