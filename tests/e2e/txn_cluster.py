"""Brokers in this process for tests of transactions: their time is the test's, every call to a store is counted by kind, and a
broker, a step or an append can be held up.

`TxnCluster` starts two brokers over one pair of stores in memory. Time stands still unless the test moves it, so that sessions
run out, deadlines pass and finished transactions are collected when the test says so, and quickly.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, cast

from braid.broker.config import BrokerConfig
from braid.errors import LedgerError, NotReady
from braid.ledger.api import LedgerListener, LedgerMetadata, LedgerReader, LedgerStore, LedgerWriter
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.labels import labelled_for
from braid.metadata.api import Event, MetadataStore
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.clock import Clock
from braid.runtime.env import Runtime
from braid.runtime.plans import Moment
from braid.scalable.config import ScalableConfig
from braid.testing.clock import ManualClock
from braid.testing.faulty_metadata import Fault, FaultyMetadata
from braid.testing.pausable import PausableClock
from braid.testing.raw_client import RawClient, entry, id_of, is_reply_to, position_of
from braid.txn import records
from braid.txn.config import TransactionConfig
from braid.txn.records import AbortedTxn, TxnHeader, TxnOp
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.node import BrokerNode
from braid.web.standalone import Standalone
from braid.wire import requests, txn_requests
from braid.wire.commands import encode
from braid.wire.messages import CommandConnect, FeatureFlags, MessageIdData
from braid.wire.types import PROTOCOL_VERSION, AckType, CommandType, LookupResult, TxnAction

SESSION_SECONDS = 3.0
TXN_SECONDS = 20.0
"""How long the transactions live that are to time out."""
LONG_SECONDS = 3600.0
RETENTION_SECONDS = 30.0
COLLECT_SECONDS = 1.0
SETTLE_SECONDS = 3.0
"""Of the test's time: enough for every reconcile and sweep to have come round twice."""
KINDS = {
    records.HEADERS: "header",
    records.OPS: "op",
    records.SUBS: "sub",
    records.ABORTED: "aborted",
    records.SERIALS: "serials",
    "/txn-tc": "coordinator",
}


def kind_of(key: str) -> str:
    """What a record is, by its path: `header`, `op`, ... of transactions, `other` for all else."""
    return KINDS.get("/" + key.strip("/").partition("/")[0], "other")


class CountedMetadata(FaultyMetadata):
    """A handle that counts its calls as (operation, kind) in `counts`, and whose watches can be stopped alone."""

    counts: Counter[tuple[str, str]]
    watching: asyncio.Event
    """Not set: no watch has anything to say."""

    def pause_heartbeat(self) -> None:
        self.inner.pause_heartbeat()  # type: ignore[attr-defined]

    async def _reach(self, operation: str, key: str, possible: Sequence[Fault]) -> Fault | None:
        self.counts[operation, kind_of(key)] += 1
        return await super()._reach(operation, key, possible)

    async def _worsen(self, events: AsyncIterator[Event]) -> AsyncIterator[Event]:
        async for event in super()._worsen(events):
            await self.watching.wait()
            yield event


class CountedLedgers:
    """A ledger store that counts appends by the log they go to and bytes read by ledger, and can hold up the appends of a log:
    on their way to the store (`outward`) or, stored already, on the way back to the writer (`backward`)."""

    def __init__(self, inner: LedgerStore) -> None:
        self.inner = inner
        self.appends: Counter[str] = Counter()
        self.appended: dict[str, list[bytes]] = {}
        """What each log was given, in order."""
        self.bytes_read = 0
        self._writers: dict[str, list[_Writer]] = {}

    def hold(self, log: str, way: str) -> None:
        """Hold up what the present writers of this log append from now on."""
        for writer in self._writers.get(log, []):
            writer.held = way

    def hold_all(self) -> None:
        """No present writer hears anything from its ledger, not even that it was fenced."""
        for writers in self._writers.values():
            for writer in writers:
                writer.held = writer.held or "backward"

    def release(self) -> None:
        """Everything goes on, in order."""
        for writers in self._writers.values():
            for writer in writers:
                writer.release()

    async def create(
        self,
        *,
        listener: LedgerListener | None = None,
        custom: Mapping[str, bytes] | None = None,
        ledger_id: int | None = None,
    ) -> LedgerWriter:
        component, name = labelled_for(custom or {}) or ("", "")
        log = name if component == "managed-ledger" else f"{component} {name}"
        back = None if listener is None else _Listener(listener)
        writer = _Writer(self, log, await self.inner.create(listener=back, custom=custom, ledger_id=ledger_id), back)
        self._writers.setdefault(log, []).append(writer)
        return cast(LedgerWriter, writer)  # its counts are those of the one below

    async def open(self, ledger_id: int, *, fence: bool) -> LedgerReader:
        return cast(LedgerReader, _Reader(self, await self.inner.open(ledger_id, fence=fence)))

    async def metadata(self, ledger_id: int) -> LedgerMetadata:
        return await self.inner.metadata(ledger_id)

    async def delete(self, ledger_id: int) -> None:
        await self.inner.delete(ledger_id)

    def ledgers(self) -> AsyncIterator[int]:
        return self.inner.ledgers()

    async def close(self) -> None:
        self.release()
        await self.inner.close()


class _Listener:
    """Between a ledger and its writer's listener."""

    def __init__(self, listener: LedgerListener) -> None:
        self._listener = listener
        self.is_held = False
        self._waiting: list[Callable[[], None]] = []

    def ledger_advanced(self, last_confirmed: int) -> None:
        self._pass(lambda: self._listener.ledger_advanced(last_confirmed))

    def ledger_failed(self, error: LedgerError) -> None:
        self._pass(lambda: self._listener.ledger_failed(error))

    def release(self) -> None:
        self.is_held = False
        waiting, self._waiting = self._waiting, []
        for call in waiting:
            call()

    def _pass(self, call: Callable[[], None]) -> None:
        if self.is_held:
            self._waiting.append(call)
        else:
            call()


class _Writer:
    """A writer whose appends are counted and can be held up."""

    def __init__(self, store: CountedLedgers, log: str, inner: LedgerWriter, back: _Listener | None) -> None:
        self._store = store
        self._log = log
        self._inner = inner
        self._back = back
        self._way = ""
        self._waiting: list[tuple[bytes, bytes]] = []
        self.ledger_id = inner.ledger_id

    @property
    def held(self) -> str:
        return self._way

    @held.setter
    def held(self, way: str) -> None:
        self._way = way
        if self._back is not None:
            self._back.is_held = bool(way)

    @property
    def last_pushed(self) -> int:
        return self._inner.last_pushed + len(self._waiting)

    @property
    def last_confirmed(self) -> int:
        return self._inner.last_confirmed

    @property
    def length(self) -> int:
        return self._inner.length + sum(len(head) + len(body) for head, body in self._waiting)

    def append(self, head: bytes, body: bytes) -> int:
        if self._way == "outward":
            self._waiting.append((head, body))
            self._note(body)
            return self.last_pushed
        number = self._inner.append(head, body)
        self._note(body)
        return number

    def _note(self, body: bytes) -> None:
        self._store.appends[self._log] += 1
        self._store.appended.setdefault(self._log, []).append(body)

    async def add(self, data: bytes) -> int:
        self._note(data)
        return await self._inner.add(data)

    async def close(self) -> LedgerMetadata:
        return await self._inner.close()

    def release(self) -> None:
        if not self._way:
            return
        self._way = ""
        waiting, self._waiting = self._waiting, []
        if self._back is not None:
            self._back.release()
        for head, body in waiting:
            try:
                self._inner.append(head, body)
            except LedgerError as error:
                if self._back is not None:
                    self._back.ledger_failed(error)
                return


class _Reader:
    """A reader whose bytes are counted."""

    def __init__(self, store: CountedLedgers, inner: LedgerReader) -> None:
        self._store = store
        self._inner = inner
        self.ledger_id = inner.ledger_id

    @property
    def last_confirmed(self) -> int:
        return self._inner.last_confirmed

    @property
    def is_closed(self) -> bool:
        return self._inner.is_closed

    async def read(self, first: int, last: int, max_bytes: int = 0) -> list[bytes]:
        found = await self._inner.read(first, last, max_bytes)
        self._store.bytes_read += sum(len(each) for each in found)
        return found

    async def length_before(self, entry_id: int) -> int:
        return await self._inner.length_before(entry_id)

    async def refresh(self) -> int:
        return await self._inner.refresh()

    async def close(self) -> None:
        await self._inner.close()


class _Wired(Standalone):
    """Standalone over counted stores."""

    counts: Counter[tuple[str, str]]

    def _handle(self, name: str, runtime: Runtime) -> MetadataStore:
        handle = CountedMetadata(super()._handle(name, runtime), runtime.clock, runtime.random)
        handle.counts = self.counts
        handle.watching = asyncio.Event()
        handle.watching.set()
        return handle

    async def _open_stores(self) -> None:
        await super()._open_stores()
        self.ledgers = CountedLedgers(self.ledgers)


class TxnCluster:
    """Brokers whose time, store calls and appends are in the test's hand; `async with` starts and stops them."""

    def __init__(
        self,
        *,
        brokers: int = 2,
        transactions: TransactionConfig | None = None,
        scalable: ScalableConfig | None = None,
        broker: BrokerConfig | None = None,
        managed_ledger: ManagedLedgerConfig | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.clock = clock or ManualClock()
        self.counts: Counter[tuple[str, str]] = Counter()
        self._clocks: dict[int, PausableClock] = {}
        self._clients: list[RawClient] = []
        self._stack = AsyncExitStack()
        config = StandaloneConfig(
            broker=broker
            or BrokerConfig(
                port=0,
                http_port=0,
                count=brokers,
                default_bundles=1,
                balance=False,
                retention_minutes=-1,
                retention_mb=-1,
                keep_alive_seconds=3600,
            ),
            storage=StorageConfig(metadata_backend="memory", ledger_backend="memory", session_timeout_seconds=SESSION_SECONDS),
            transactions=transactions
            or TransactionConfig(retention_seconds=RETENTION_SECONDS, collect_seconds=COLLECT_SECONDS, coordinators=4),
            scalable_topics=scalable or ScalableConfig(),
            managed_ledger=managed_ledger or ManagedLedgerConfig(),
        )
        self.standalone = _Wired(config, Runtime(clock=self.clock), with_http=False, runtime_of=self._runtime_of)
        self.standalone.counts = self.counts

    async def __aenter__(self) -> TxnCluster:
        await self._stack.enter_async_context(self.standalone)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for client in self._clients:
            client.close()
        for number in self._clocks:
            self.resume(number)
        self.ledgers.release()
        await self._stack.aclose()

    def _runtime_of(self, number: int) -> Runtime:
        clock = self._clocks[number] = PausableClock(self.clock)
        return Runtime(clock=clock)

    @property
    def nodes(self) -> list[BrokerNode]:
        return self.standalone.brokers

    @property
    def ledgers(self) -> CountedLedgers:
        ledgers = self.standalone.ledgers
        assert isinstance(ledgers, CountedLedgers)
        return ledgers

    @property
    def rows(self) -> dict[str, Any]:
        rows: dict[str, Any] = self.standalone.metadata.tables.rows
        return rows

    # Time and trouble.

    async def advance(self, seconds: float) -> None:
        """Move time, with some turns of the loop for what travels over sockets."""
        assert isinstance(self.clock, ManualClock)
        whole, rest = divmod(seconds, 0.5)
        for part in [0.5] * int(whole) + [rest]:
            await self.clock.advance(part)
            await turns(5)

    async def until(self, what: str, is_so: Callable[[], bool], seconds: float = 30.0) -> None:
        """Move time until something is so."""
        for _ in range(int(seconds / 0.25)):
            if is_so():
                return
            await self.advance(0.25)
        raise AssertionError(f"{what}: not so after {seconds:g} s")

    def pause(self, number: int) -> None:
        """A broker does nothing more: its timers stop, its calls to the metadata store and their watches too, and it hears
        nothing of its ledgers (nor does any other broker of those it has now)."""
        self._clocks[number].pause()
        self.metadata(number).freeze()
        self.metadata(number).watching.clear()
        self.ledgers.hold_all()

    def wake(self, number: int) -> None:
        """What a paused broker was in the middle of goes on; its timers and watches do not, so that it knows no better."""
        self.metadata(number).thaw()

    def resume(self, number: int) -> None:
        """It goes on as if nothing had happened."""
        if self._clocks[number].is_paused:
            self.metadata(number).thaw()
            self.metadata(number).watching.set()
            self.ledgers.release()
            self._clocks[number].resume()

    async def move(self, number: int, to: RawClient, topic: str) -> None:
        """A broker stands still until its session is over, and the broker of `to` takes the topic."""
        self.pause(number)
        await self.advance(SESSION_SECONDS + 1)
        await self.take(to, topic)

    def metadata(self, number: int) -> CountedMetadata:
        """A broker's handle."""
        handle = self.nodes[number].metadata
        assert isinstance(handle, CountedMetadata)
        return handle

    async def restart(self) -> int:
        """Every broker dies and a new one starts over the same stores; returns its number."""
        for number, node in enumerate(self.nodes):
            if not node.is_down:
                self.resume(number)
                await node.kill()
        await self.advance(SESSION_SECONDS + 1)
        await self.standalone.add_broker()
        await self.advance(1.0)
        return len(self.nodes) - 1

    # Clients.

    async def client(self, number: int, *, is_braid: bool = True) -> RawClient:
        """A connection to a broker, as Braid's own client or as any other."""
        client = await RawClient.connect(self.nodes[number].service_url, handshake=False, answers_pings=True)
        flags = FeatureFlags(supports_broker_entry_metadata=True)
        if is_braid:
            flags.supports_braid = True
        hello = CommandConnect(client_version="tests", protocol_version=PROTOCOL_VERSION, feature_flags=flags)
        client.send(encode(CommandType.CONNECT, hello))
        await client.expect(CommandType.CONNECTED)
        self._clients.append(client)
        return client

    async def take(self, client: RawClient, topic: str) -> None:
        """Make the broker of this client the owner of the topic."""
        for _ in range(200):
            request = client.next_request()
            client.send(requests.lookup(request, topic, authoritative=True))
            reply = await client.answer(request)
            if reply.response == int(LookupResult.CONNECT):
                return
            await self.advance(0.25)
        raise AssertionError(f"{topic} did not come to this broker")

    # What is left in the metadata store.

    def headers(self) -> dict[TxnId, TxnHeader]:
        return {
            TxnId.parse(key.rpartition("/")[2]): records.decode_header(key, row[-1])
            for key, row in sorted(self.rows.items())
            if key.startswith(records.HEADERS + "/")
        }

    def ops(self) -> dict[str, TxnOp]:
        return {
            key: records.decode_op(key, row[-1]) for key, row in sorted(self.rows.items()) if key.startswith(records.OPS + "/")
        }

    def aborted(self, topic: str) -> dict[TxnId, AbortedTxn]:
        return {
            TxnId.parse(key.rpartition("/")[2]): records.decode_aborted(key, row[-1])
            for key, row in sorted(self.rows.items())
            if key.startswith(records.aborted_in(topic) + "/")
        }


# Talking of transactions over a raw connection.


async def begin(client: RawClient, seconds: float = LONG_SECONDS, coordinator: int = 0) -> TxnId:
    request = client.next_request()
    client.send(txn_requests.new(request, coordinator, int(seconds * 1000)))
    reply = await client.answer(request)
    assert not reply.HasField("error"), reply
    return TxnId(reply.txnid_most_bits, reply.txnid_least_bits)


async def end(client: RawClient, txn: TxnId, action: TxnAction) -> Any:
    """END_TXN's answer, an error inside it too."""
    request = client.next_request()
    client.send(txn_requests.end(request, txn, action))
    return (await client.take(is_reply_to(request), f"the answer to END_TXN {txn}")).body


async def commit(client: RawClient, txn: TxnId) -> None:
    reply = await end(client, txn, TxnAction.COMMIT)
    assert not reply.HasField("error"), reply


async def abort(client: RawClient, txn: TxnId) -> None:
    reply = await end(client, txn, TxnAction.ABORT)
    assert not reply.HasField("error"), reply


def send(client: RawClient, payload: bytes, sequence_id: int, producer_id: int, txn: TxnId | None = None) -> None:
    made = entry(payload, sequence_id, producer_name=f"p{producer_id}")
    client.send(requests.send(producer_id, sequence_id, made, txn=txn))


def ack(
    client: RawClient,
    consumer_id: int,
    at: Position | MessageIdData,
    txn: TxnId | None,
    *,
    cumulative: bool = False,
) -> int:
    """ACK with a request id, which is returned."""
    request = client.next_request()
    kind = AckType.CUMULATIVE if cumulative else AckType.INDIVIDUAL
    named = id_of(at) if isinstance(at, Position) else at
    client.send(requests.ack(consumer_id, [named], kind, request, txn=txn))
    return request


async def sent(client: RawClient, payload: bytes, sequence_id: int, producer_id: int, txn: TxnId | None = None) -> Position:
    """SEND and the position of its receipt."""
    send(client, payload, sequence_id, producer_id, txn)
    return position_of((await client.receipt()).message_id)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


class Hold:
    """A hook for `plans.watching` that stops whoever comes to a step, until released."""

    def __init__(self) -> None:
        self.step: str | None = None
        self.arrived = 0
        self._released = asyncio.Event()

    def at(self, step: str) -> None:
        """From now on stop at this step; those who stand at another stay there."""
        self.step, self.arrived = step, 0

    def off(self) -> None:
        self.step = None

    def release(self) -> None:
        self.off()
        self._released.set()

    async def __call__(self, name: str, moment: Moment) -> None:
        if moment == "before" and name == self.step:
            self.arrived += 1
            await self._released.wait()


async def retried(cluster: TxnCluster, attempt: Callable[..., Awaitable[Any]], *args: Any, **options: Any) -> Any:
    """Try until a broker is ready to do it."""
    for _ in range(80):
        try:
            return await attempt(*args, **options)
        except NotReady:
            await cluster.advance(0.25)
    return await attempt(*args, **options)


def topic_log(topic: str) -> str:
    """The name of a topic's log."""
    return TopicName.parse(topic).managed_ledger_name
