"""`RawClient`: a client that sends exactly the frames a test gives it and shows exactly the frames that come back.

Made for testing protocol rules on the wire: nothing is retried, answered or reconnected behind the test's back (a PING of the
broker stays unanswered, too, unless `answers_pings`). Waiting is bounded by real time, everything else by what arrives.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from braid.errors import ProtocolError, from_code
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.wire import requests, txn_requests
from braid.wire.batch import encode_batch
from braid.wire.client import Bulk, ClientProtocol, Delivery
from braid.wire.commands import Command, encode, enum_value, signed64, unsigned64
from braid.wire.entries import build_entry, entry_metadata, payload_offset
from braid.wire.messages import (
    CommandConnect,
    CommandProducer,
    CommandSubscribe,
    FeatureFlags,
    MessageIdData,
    MessageMetadata,
    SingleMessageMetadata,
)
from braid.wire.replies import PING, PONG
from braid.wire.types import (
    PROTOCOL_VERSION,
    AckType,
    CommandType,
    InitialPosition,
    ProducerAccessMode,
    SubType,
    TxnAction,
)

WAIT_SECONDS = 10.0
CPP = "Pulsar-CPP-v4.2.0"
JAVA = "Pulsar-Java-v4.0.0"

Event = Command | Delivery | Bulk


def entry(
    payload: bytes,
    sequence_id: int = 0,
    *,
    producer_name: str = "p",
    batch: Iterable[bytes] | None = None,
    chunk: tuple[str, int, int] | None = None,
    **fields: Any,
) -> bytes:
    """An entry as a client would send it; `batch` replaces the payload, `chunk` is (uuid, number, how many)."""
    metadata = MessageMetadata(producer_name=producer_name, sequence_id=unsigned64(sequence_id), publish_time=1, **fields)
    if batch is not None:
        members = list(batch)
        metadata.num_messages_in_batch = len(members)
        payload = encode_batch((SingleMessageMetadata(), each) for each in members)
    if chunk is not None:
        metadata.uuid, metadata.chunk_id, metadata.num_chunks_from_msg = chunk
    return build_entry(metadata, payload)


def payload_of(delivery: Delivery) -> bytes:
    return delivery.entry[payload_offset(delivery.entry) :]


def metadata_of(delivery: Delivery) -> MessageMetadata:
    return entry_metadata(delivery.entry)


def position_of(message_id: MessageIdData) -> Position:
    return Position(signed64(message_id.ledgerId), signed64(message_id.entryId))


def id_of(position: Position, ack_set: Iterable[int] = ()) -> MessageIdData:
    return MessageIdData(ledgerId=unsigned64(position.ledger_id), entryId=unsigned64(position.entry_id), ack_set=list(ack_set))


def is_reply_to(request_id: int) -> Callable[[Event], bool]:
    def matches(event: Event) -> bool:
        return (
            isinstance(event, Command | Bulk)
            and "request_id" in event.body.DESCRIPTOR.fields_by_name
            and event.body.HasField("request_id")
            and signed64(event.body.request_id) == request_id
        )

    return matches


class RawClient(asyncio.Protocol):
    """One connection. Make it with `await RawClient.connect(...)`."""

    def __init__(self, *, answers_pings: bool = False) -> None:
        self.inbox: list[Event] = []
        """Everything received and not yet taken by the test, in order."""
        self.is_closed = False
        self.answers_pings = answers_pings
        self._protocol = ClientProtocol()
        self._transport: asyncio.Transport
        self._arrived = asyncio.Event()
        self._requests = 0

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        handshake: bool = True,
        client_version: str = CPP,
        protocol_version: int = PROTOCOL_VERSION,
        answers_pings: bool = False,
        is_braid: bool = False,
    ) -> RawClient:
        """Open a connection to `pulsar://host:port` and, unless told otherwise, shake hands."""
        address = urlsplit(url)
        _, client = await asyncio.get_running_loop().create_connection(
            lambda: cls(answers_pings=answers_pings), address.hostname or "localhost", address.port or 6650
        )
        if handshake:
            try:
                client.send(hello(client_version, protocol_version, is_braid=is_braid))
                await client.expect(CommandType.CONNECTED)
            except BaseException:  # whoever gives up waiting has nothing to close it by
                client.close()
                raise
        return client

    # asyncio's calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        for event in self._protocol.receive(data):
            if isinstance(event, ProtocolError):
                raise event
            if isinstance(event, Command) and event.type == CommandType.PING and self.answers_pings:
                self.send(PONG)
                continue
            self.inbox.append(event)
        self._arrived.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        self._arrived.set()

    # the test's calls

    def send(self, *frames: bytes) -> None:
        """Send bytes as they are, in one write."""
        self._transport.write(b"".join(frames))

    def close(self) -> None:
        self._transport.abort()

    def stop_reading(self) -> None:
        """Let the broker's bytes pile up."""
        self._transport.pause_reading()

    def start_reading(self) -> None:
        self._transport.resume_reading()

    def next_request(self) -> int:
        self._requests += 1
        return self._requests

    async def take(self, wanted: Callable[[Event], bool], what: str = "a frame") -> Any:
        """The first matching event, now or as soon as it arrives; the others stay in the inbox."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while True:
                    for number, event in enumerate(self.inbox):
                        if wanted(event):
                            return self.inbox.pop(number)
                    if self.is_closed:
                        raise ConnectionError(f"the broker closed the connection while {what} was awaited")
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"{what} did not come; the inbox has {self.inbox}") from None

    async def expect(self, kind: CommandType) -> Any:
        """The body of the next frame of this type."""
        event = await self.take(lambda each: isinstance(each, Command) and each.type == kind, kind.name)
        return event.body

    async def answer(self, request_id: int) -> Any:
        """The reply to a request; an ERROR is raised as Braid's error."""
        event = await self.take(is_reply_to(request_id), f"the answer to request {request_id}")
        if event.type == CommandType.ERROR:
            raise from_code(event.body.error, event.body.message)
        return event.body

    async def messages(self, count: int) -> list[Delivery]:
        """The next `count` MESSAGEs."""
        return [await self.take(lambda each: isinstance(each, Delivery), "a MESSAGE") for _ in range(count)]

    async def payloads(self, count: int) -> list[bytes]:
        return [payload_of(delivery) for delivery in await self.messages(count)]

    async def expect_close(self) -> None:
        """The broker closes the connection."""
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                while not self.is_closed:
                    self._arrived.clear()
                    await self._arrived.wait()
        except TimeoutError:
            raise AssertionError(f"the broker did not close the connection; the inbox has {self.inbox}") from None

    async def settle(self, rounds: int = 5) -> list[Event]:
        """Some round trips to the broker, so that what it had to say has arrived; returns the inbox."""
        for _ in range(rounds):
            self.send(PING)
            await self.expect(CommandType.PONG)
        return self.inbox

    def kinds(self) -> list[CommandType]:
        """Types of the frames in the inbox, in order."""
        return [CommandType.MESSAGE if isinstance(each, Delivery) else CommandType(each.type) for each in self.inbox]

    # requests with their answers

    async def producer(
        self,
        topic: str,
        producer_id: int = 1,
        *,
        name: str | None = None,
        mode: ProducerAccessMode = ProducerAccessMode.SHARED,
        request_id: int | None = None,
        **fields: Any,
    ) -> Any:
        """PRODUCER and its (first) answer."""
        request_id = request_id or self.next_request()
        body = CommandProducer(
            topic=topic,
            producer_id=producer_id,
            request_id=request_id,
            producer_name=name,
            producer_access_mode=enum_value(mode),
            **fields,
        )
        self.send(encode(CommandType.PRODUCER, body))
        return await self.answer(request_id)

    def publish(self, payload: bytes, sequence_id: int, producer_id: int = 1, **fields: Any) -> None:
        """SEND one message (see `entry` for the fields, and `txn`); receipts come as SEND_RECEIPT."""
        batch = fields.get("batch")
        highest = fields.pop("highest", None)
        txn = fields.pop("txn", None)
        count = 1 if batch is None else len(batch)
        made = entry(payload, sequence_id, **fields)
        self.send(
            requests.send(
                producer_id,
                sequence_id,
                made,
                count,
                highest_sequence_id=highest,
                txn=txn,
                is_chunk=fields.get("chunk") is not None,
            )
        )

    async def receipt(self) -> Any:
        return await self.expect(CommandType.SEND_RECEIPT)

    async def store(self, payload: bytes, sequence_id: int, producer_id: int = 1, **fields: Any) -> Position:
        """SEND one message and return the position its receipt names."""
        self.publish(payload, sequence_id, producer_id, **fields)
        return position_of((await self.receipt()).message_id)

    async def subscribe(
        self,
        topic: str,
        subscription: str = "sub",
        sub_type: SubType = SubType.EXCLUSIVE,
        consumer_id: int = 1,
        *,
        permits: int = 0,
        initial: InitialPosition = InitialPosition.LATEST,
        metadata: Mapping[str, str] | None = None,
        **fields: Any,
    ) -> Any:
        """SUBSCRIBE and its answer, then FLOW if permits are given."""
        request_id = self.next_request()
        body = CommandSubscribe(
            topic=topic,
            subscription=subscription,
            subType=enum_value(sub_type),
            consumer_id=consumer_id,
            request_id=request_id,
            initialPosition=enum_value(initial),
            **fields,
        )
        for key, value in (metadata or {}).items():
            body.metadata.add(key=key, value=value)
        self.send(encode(CommandType.SUBSCRIBE, body))
        reply = await self.answer(request_id)
        if permits:
            self.flow(permits, consumer_id)
        return reply

    def flow(self, permits: int, consumer_id: int = 1) -> None:
        self.send(requests.flow(consumer_id, permits))

    def ack(self, *positions: Position, consumer_id: int = 1, cumulative: bool = False, request_id: int | None = None) -> None:
        kind = AckType.CUMULATIVE if cumulative else AckType.INDIVIDUAL
        self.send(requests.ack(consumer_id, [id_of(each) for each in positions], kind, request_id))

    async def acked(
        self, *ids: Position | MessageIdData, consumer_id: int = 1, cumulative: bool = False, txn: TxnId | None = None
    ) -> Any:
        """ACK with a receipt; returns the ACK_RESPONSE."""
        request_id = self.next_request()
        kind = AckType.CUMULATIVE if cumulative else AckType.INDIVIDUAL
        named = [each if isinstance(each, MessageIdData) else id_of(each) for each in ids]
        self.send(requests.ack(consumer_id, named, kind, request_id, txn))
        return await self.answer(request_id)

    def redeliver(self, *positions: Position, consumer_id: int = 1, epoch: int | None = None) -> None:
        self.send(requests.redeliver(consumer_id, [id_of(each) for each in positions], epoch))

    async def seek(self, to: Position | MessageIdData | int, consumer_id: int = 1) -> Any:
        """SEEK and its answer; the CLOSE_CONSUMER before it stays in the inbox."""
        request_id = self.next_request()
        target = to if isinstance(to, int | MessageIdData) else id_of(to)
        self.send(requests.seek(request_id, consumer_id, target))
        return await self.answer(request_id)

    async def last_message_id(self, consumer_id: int = 1) -> Any:
        request_id = self.next_request()
        self.send(requests.get_last_message_id(request_id, consumer_id))
        return await self.answer(request_id)

    async def unsubscribe(self, consumer_id: int = 1, *, force: bool = False) -> Any:
        request_id = self.next_request()
        self.send(requests.unsubscribe(request_id, consumer_id, force))
        return await self.answer(request_id)

    async def close_producer(self, producer_id: int = 1) -> Any:
        request_id = self.next_request()
        self.send(requests.close_producer(request_id, producer_id))
        return await self.answer(request_id)

    async def close_consumer(self, consumer_id: int = 1) -> Any:
        request_id = self.next_request()
        self.send(requests.close_consumer(request_id, consumer_id))
        return await self.answer(request_id)

    async def begin(self, coordinator: int = 0, ttl_ms: int = 60_000, *, is_decider: bool = False) -> TxnId:
        """NEW_TXN; a refusal is raised."""
        request_id = self.next_request()
        self.send(txn_requests.new(request_id, coordinator, ttl_ms, is_decider=is_decider))
        return await self._transaction(request_id)

    async def end(self, txn: TxnId, *, commit: bool) -> TxnId:
        """END_TXN; a refusal is raised."""
        request_id = self.next_request()
        self.send(txn_requests.end(request_id, txn, TxnAction.COMMIT if commit else TxnAction.ABORT))
        return await self._transaction(request_id)

    async def _transaction(self, request_id: int) -> TxnId:
        reply = await self.answer(request_id)
        if reply.HasField("error"):
            raise from_code(reply.error, reply.message)
        return TxnId(reply.txnid_most_bits, reply.txnid_least_bits)


def hello(client_version: str = CPP, protocol_version: int = PROTOCOL_VERSION, *, is_braid: bool = False) -> bytes:
    """CONNECT of a client of this kind and age."""
    body = CommandConnect(
        client_version=client_version,
        protocol_version=protocol_version,
        feature_flags=FeatureFlags(supports_broker_entry_metadata=True),
    )
    if is_braid:
        body.feature_flags.supports_braid = True
    return encode(CommandType.CONNECT, body)
