"""A scalable topic whose broker is a script: the test decides what is stored, what is answered and what the client is told, and
in which order. Several such brokers can serve one topic."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable
from typing import Any

from braid.client import ClientConfig
from braid.client.producer import Producer
from braid.errors import BraidError, TopicTerminated
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.txn import TxnId
from braid.runtime.env import Runtime
from braid.runtime.network import Listener
from braid.wire import messages as pb
from braid.wire import replies
from braid.wire.batch import decode_batch
from braid.wire.commands import Command, encode, enum_value
from braid.wire.compression import decompress
from braid.wire.encode import send_receipt
from braid.wire.entries import entry_metadata, payload_offset
from braid.wire.server import Send, ServerProtocol
from braid.wire.types import CommandType, LookupResult, TxnAction

TOPIC = "topic://public/default/t"
QUICK = ClientConfig(
    backoff_initial=0.005, backoff_max=0.02, operation_timeout=5, layout_check=0.05, max_pending_messages=10_000
)
Message = tuple[str | None, bytes]


_OF_TRANSACTIONS = (CommandType.WATCH_TC_ASSIGNMENTS, CommandType.NEW_TXN, CommandType.END_TXN)


class ScriptedCoordinators:
    """The transactional side of a scripted broker: begins transactions and notes how they were ended."""

    def __init__(self, count: int = 2) -> None:
        self.count = count
        self.places: dict[int, str] = {}
        """What watches are told: coordinator -> broker."""
        self.refusal: BraidError | None = None
        """Of watches."""
        self.watches: list[tuple[asyncio.Transport, int]] = []
        self.broken: dict[int, BraidError] = {}
        """Coordinators that begin nothing, and what they say."""
        self.asked: list[int] = []
        """Coordinator of each NEW_TXN."""
        self.begun: list[tuple[int, int]] = []
        """Coordinator and time to live of each NEW_TXN that was not refused."""
        self.ended: list[tuple[TxnId, str]] = []
        """Each END_TXN: transaction, COMMIT or ABORT."""
        self.answers: list[BraidError | str | None] = []
        """To the next END_TXNs: an error, "lost" (the connection ends), "silent", or None for success."""
        self.changed = asyncio.Event()

    def tell(self) -> None:
        for transport, watch_id in self.watches:
            self._tell(transport, watch_id)

    def _tell(self, transport: asyncio.Transport, watch_id: int) -> None:
        body = pb.CommandWatchTcAssignmentsUpdate(watch_id=watch_id)
        if self.refusal is not None:
            body.error = enum_value(self.refusal.code)
            body.message = self.refusal.message
        else:
            body.snapshot.parallelism = self.count
            for number, url in self.places.items():
                body.snapshot.assignments.add(tc_id=number, broker_service_url=url)
        transport.write(encode(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE, body))

    def answer(self, transport: asyncio.Transport, kind: int, body: Any) -> None:
        self.changed.set()
        if kind == CommandType.WATCH_TC_ASSIGNMENTS:
            self.watches.append((transport, body.watch_id))
            self._tell(transport, body.watch_id)
        elif kind == CommandType.NEW_TXN:
            self.asked.append(body.tc_id)
            if (error := self.broken.get(body.tc_id)) is not None:
                refused = pb.CommandNewTxnResponse(
                    request_id=body.request_id, error=enum_value(error.code), message=error.message
                )
                transport.write(encode(CommandType.NEW_TXN_RESPONSE, refused))
                return
            self.begun.append((body.tc_id, body.txn_ttl_millis))
            txn = TxnId.of(body.tc_id, len(self.begun))
            reply = pb.CommandNewTxnResponse(request_id=body.request_id, txnid_most_bits=txn.most, txnid_least_bits=txn.least)
            transport.write(encode(CommandType.NEW_TXN_RESPONSE, reply))
        else:
            self._end(transport, body)

    def _end(self, transport: asyncio.Transport, body: Any) -> None:
        action = "COMMIT" if body.txn_action == TxnAction.COMMIT else "ABORT"
        self.ended.append((TxnId(body.txnid_most_bits, body.txnid_least_bits), action))
        found = self.answers.pop(0) if self.answers else None
        if found == "lost":
            transport.abort()
        elif found != "silent":
            reply = pb.CommandEndTxnResponse(
                request_id=body.request_id, txnid_most_bits=body.txnid_most_bits, txnid_least_bits=body.txnid_least_bits
            )
            if isinstance(found, BraidError):
                reply.error = enum_value(found.code)
                reply.message = found.message
            transport.write(encode(CommandType.END_TXN_RESPONSE, reply))

    async def saw_end(self, count: int = 1) -> None:
        async with asyncio.timeout(10):
            while len(self.ended) < count:
                self.changed.clear()
                await self.changed.wait()


class Segment:
    """What one segment stores."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.transactions: list[tuple[TxnId | None, int]] = []
        """Of each entry: its transaction, and how many messages it has."""
        self.entries = 0
        self.last: dict[str, int] = {}
        """Deduplication: highest sequence id stored, by lane name."""
        self.is_sealed = False
        self.names: list[str] = []
        """Lanes that were let in, in order."""


class Script(asyncio.Protocol):
    """One connection of the scripted broker."""

    def __init__(self, topic: ScriptedTopic) -> None:
        self.topic = topic
        self.producers: dict[int, tuple[str, int, bool]] = {}
        """Producer id -> lane name, segment, whether it is deduplicated."""
        self.sessions: list[int] = []
        self._wire = ServerProtocol(5 << 20)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: asyncio.Transport = transport  # type: ignore[assignment]
        self.topic.connections.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.topic.connections.remove(self)

    def data_received(self, data: bytes) -> None:
        for event in self._wire.receive(data):
            if isinstance(event, Send):
                self.topic.sent.append((self, event))
                self.topic.pump()
            elif isinstance(event, Command):
                self.topic.seen[event.type] += 1
                self._answer(event.type, event.body)

    def _answer(self, kind: int, body: Any) -> None:
        write, topic = self.transport.write, self.topic
        if kind == CommandType.CONNECT:
            flags = pb.FeatureFlags(supports_scalable_topics=topic.is_enabled)
            write(replies.connected("script", body.protocol_version, topic.max_size, flags))
        elif kind == CommandType.PING:
            write(replies.PONG)
        elif kind == CommandType.PARTITIONED_METADATA:
            write(replies.partitions(body.request_id, 0))
        elif kind == CommandType.LOOKUP:
            write(replies.lookup(body.request_id, LookupResult.CONNECT, topic.url, authoritative=True))
        elif kind == CommandType.SCALABLE_TOPIC_LOOKUP:
            if topic.refusal is None:
                self.sessions.append(body.session_id)
                if not topic.is_silent:
                    topic.tell(self, body.session_id)
            else:
                write(_update(body.session_id, error=topic.refusal))
        elif kind == CommandType.SCALABLE_TOPIC_CLOSE:
            self.sessions.remove(body.session_id)
        elif kind == CommandType.PRODUCER:
            self._attach(body)
        elif kind == CommandType.CLOSE_PRODUCER:
            self.producers.pop(body.producer_id, None)
            write(replies.success(body.request_id))
        elif kind in _OF_TRANSACTIONS:
            topic.transactions.answer(self.transport, kind, body)

    def _attach(self, body: Any) -> None:
        topic = self.topic
        descriptor = TopicName.parse(body.topic).descriptor
        segment_id = descriptor.segment_id if descriptor is not None else -1
        segment = topic.segments[segment_id]
        error = topic.attach_errors.get(segment_id) or topic.attach_errors.get(body.producer_name)
        if segment.is_sealed:
            error = TopicTerminated("It was terminated.")
        if error is not None:
            self.transport.write(replies.error(body.request_id, error.code, error.message))
            return
        name = body.producer_name or "given"
        is_judged = topic.deduplicates_all or "__braid.dedup" in {pair.key for pair in body.metadata}
        self.producers[body.producer_id] = (name, segment_id, is_judged)
        segment.names.append(name)
        if topic.ignores_producers:
            return
        last = segment.last.get(name, -1) if is_judged else -1
        base = name.rpartition("-seg-")[0]
        elders = {
            number: segment.last[lane] for number in range(segment_id) if (lane := f"{base}-seg-{number}") in segment.last
        }
        success = replies.producer_success(body.request_id, name, last, b"", elders=elders if is_judged else None)
        self.transport.write(success)


class ScriptedTopic:
    """A scalable topic and its broker."""

    def __init__(self, segments: int = 1) -> None:
        self.layout = SegmentLayout.initial(segments, 0)
        self.shown = self.layout
        """What clients are told; the layout itself may be ahead."""
        self.segments: dict[int, Segment] = defaultdict(Segment)
        self.connections: list[Script] = []
        self.sent: list[tuple[Script, Send]] = []
        """Received and not dealt with."""
        self.seen: Counter[int] = Counter()
        self.attach_errors: dict[int | str, BraidError] = {}
        """By segment or by lane name."""
        self.refusal: BraidError | None = None
        self.is_enabled = True
        self.deduplicates_all = False
        """Whether producers are deduplicated that did not ask for it."""
        self.is_silent = False
        """Whether a new session is told nothing until something changes."""
        self.ignores_producers = False
        """Whether PRODUCER is not answered, though the producer is let in."""
        self.is_paused = False
        self.answers = True
        self.ends_by_error = False
        """Whether messages to a sealed segment are refused one by one, instead of closing the producer."""
        self.max_size = 5 << 20
        self.transactions = ScriptedCoordinators()
        self.refuses: dict[TxnId, BraidError] = {}
        """Transactions whose messages are refused."""
        self.incarnation = "one"
        self.url = ""
        self.listener: Listener

    # What clients see.

    def tell(self, connection: Script, session_id: int) -> None:
        connection.transport.write(_update(session_id, self.shown, self.incarnation))

    def show(self) -> None:
        """Push the newest layout."""
        self.shown = self.layout
        for connection in self.connections:
            for session_id in connection.sessions:
                self.tell(connection, session_id)

    def end(self, error: BraidError) -> None:
        """End every session."""
        self.refusal = error
        for connection in self.connections:
            for session_id in connection.sessions:
                connection.transport.write(_update(session_id, error=error))
            connection.sessions.clear()

    # Storing.

    def pump(self) -> None:
        if not self.is_paused:
            self.store(len(self.sent))

    def store(self, count: int) -> None:
        """Deal with the first messages received."""
        for connection, send in self.sent[:count]:
            self._store(connection, send)
        del self.sent[:count]

    def _store(self, connection: Script, send: Send) -> None:
        if connection not in self.connections or send.producer_id not in connection.producers:
            return  # of a producer that was closed
        name, segment_id, is_deduplicated = connection.producers[send.producer_id]
        segment = self.segments[segment_id]
        write = connection.transport.write
        if segment.is_sealed:
            write(replies.send_error(send.producer_id, send.sequence_id, TopicTerminated.code, "sealed"))
            return
        highest = max(send.sequence_id, send.highest_sequence_id)
        txn = None
        if send.txn_most is not None and send.txn_least is not None:
            txn = TxnId(send.txn_most, send.txn_least)
            if (error := self.refuses.get(txn)) is not None:
                write(replies.send_error(send.producer_id, highest, error.code, error.message))
                return
        place = (segment_id + 100, segment.entries)
        if is_deduplicated and send.sequence_id <= segment.last.get(name, -1):
            place = (-1, -1)
        else:
            segment.entries += 1
            segment.messages += _messages(send.entry)
            segment.transactions.append((txn, send.num_messages))
            segment.last[name] = highest
        if self.answers:
            write(send_receipt(send.producer_id, send.sequence_id, highest, *place))

    # Changes.

    def seal(self, segment_id: int) -> None:
        """What was not stored yet is refused."""
        self.segments[segment_id].is_sealed = True
        if self.ends_by_error:
            return
        for connection in self.connections:
            for producer_id, (_name, where, _dedup) in list(connection.producers.items()):
                if where == segment_id:
                    del connection.producers[producer_id]
                    connection.transport.write(replies.close_producer(producer_id))

    def replace(self, layout: SegmentLayout, *parents: int) -> None:
        """Seal the parents and give the children what they stored of each lane; not shown yet."""
        for parent in parents:
            self.seal(parent)
        for child in set(layout.active_segments) - set(self.layout.active_segments):
            for parent in parents:
                self.segments[child].last.update(self.segments[parent].last)
        self.layout = layout

    def split(self, segment_id: int) -> None:
        self.replace(self.layout.split(segment_id, 0), segment_id)

    def merge(self, first: int, second: int) -> None:
        self.replace(self.layout.merge(first, second, 0), first, second)

    def crash(self) -> None:
        """Every connection ends; what was received and not stored is gone."""
        self.sent.clear()
        for connection in list(self.connections):
            connection.transport.abort()

    # Checking.

    def by_key(self) -> dict[str | None, list[bytes]]:
        """The messages of each key as a reader of the DAG sees them: parents before children."""
        found: dict[str | None, list[bytes]] = defaultdict(list)
        for segment_id in sorted(self.segments):
            for key, payload in self.segments[segment_id].messages:
                found[key].append(payload)
        return found

    def attached(self) -> list[str]:
        """The names of the lanes that are at the broker now."""
        return [name for connection in self.connections for name, _where, _dedup in connection.producers.values()]

    def count(self) -> int:
        return sum(len(segment.messages) for segment in self.segments.values())


def _update(
    session_id: int, layout: SegmentLayout | None = None, incarnation: str = "", error: BraidError | None = None
) -> bytes:
    body = pb.CommandScalableTopicUpdate(session_id=session_id)
    if error is not None:
        body.error = error.code  # type: ignore[assignment]
        body.message = error.message
    if layout is not None:
        body.resolved_topic_name = TOPIC
        body.dag.epoch = layout.epoch
        body.dag.incarnation = incarnation
        body.dag.routing = layout.routing
        for each in layout.all_segments.values():
            body.dag.segments.add(
                segment_id=each.segment_id,
                hash_start=each.hash_range.start,
                hash_end=each.hash_range.end,
                state=enum_value(int(each.is_sealed)),
                parent_ids=each.parent_ids,
                child_ids=each.child_ids,
                created_at_epoch=each.created_at_epoch,
                created_at_ms=0,
                sealed_at_epoch=each.sealed_at_epoch if each.is_sealed else None,
            )
    return encode(CommandType.SCALABLE_TOPIC_UPDATE, body)


def _messages(entry: bytes) -> list[Message]:
    metadata = entry_metadata(entry)
    payload = decompress(metadata.compression, entry[payload_offset(entry) :], metadata.uncompressed_size, 128 << 20)
    if not metadata.HasField("num_messages_in_batch"):
        return [(metadata.partition_key if metadata.HasField("partition_key") else None, payload)]
    batch = decode_batch(payload, metadata.num_messages_in_batch)
    return [(single.partition_key if single.HasField("partition_key") else None, body) for single, body in batch]


async def until(holds: Callable[[], bool]) -> None:
    """Let the loop turn until something that no event announces has happened."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[ScriptedTopic]:
    """A topic of one segment and its broker, reachable at `url`."""
    scripted = ScriptedTopic()
    scripted.listener = await Runtime().network.listen("localhost", 0, lambda: Script(scripted))
    scripted.url = f"pulsar://localhost:{scripted.listener.port}"
    yield scripted
    scripted.listener.close()
    for connection in list(scripted.connections):
        connection.transport.abort()
    await asyncio.sleep(0)


class Sender:
    """Sends numbered messages of several keys and knows what must be stored."""

    def __init__(self, producer: Producer, keys: int = 16) -> None:
        self.producer = producer
        self.futures: list[asyncio.Future[Any]] = []
        self.wanted: dict[str | None, list[bytes]] = defaultdict(list)
        self._keys = [f"key-{number}" for number in range(keys)]

    def send(self, count: int) -> None:
        for _each in range(count):
            number = len(self.futures)
            key = self._keys[number % len(self._keys)]
            payload = b"%d" % number
            self.wanted[key].append(payload)
            self.futures.append(self.producer.send_nowait(payload, key=key))

    async def all_stored(self) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*self.futures)
