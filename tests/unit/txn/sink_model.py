"""A job that writes to a sink, with everything that can go wrong around it, in an order that the test chooses.

Every call to the metadata store is a point where somebody else may go first. Drivers and task attempts die there, answers get
lost there and requests are sent again, writes come late. Runs of the job overlap: the old one's driver and attempts go on
beside the new one's. Time passes, deadlines abort, and ended transactions are collected. What is exercised is the brokers'
code: coordinator, sinks, sweeps. Only the log is a list, whose owner follows INV10 to INV12.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from braid.errors import (
    BraidError,
    InvalidTransactionStatus,
    OutcomeUnknown,
    StoreError,
    TransactionConflict,
    TransactionNotFound,
    VersionConflict,
)
from braid.metadata.api import ABSENT, IndexSpan, Record, Span
from braid.model.txn import TxnId
from braid.txn import records
from braid.txn.config import TransactionConfig
from braid.txn.coordinator import TransactionCoordinator
from braid.txn.records import SinkBatch, TxnOp
from braid.txn.sinks import Sinks
from braid.txn.store import TransactionStore
from braid.txn.sweeps import TransactionSweeps

T = TypeVar("T")
Row = tuple[int, int, int]
SINK = "query/topic"
BATCHES, PARTITIONS, ROWS = 3, 2, 1
TIMEOUT_MS = 60_000
TURNS = 4
"""Of the loop, after which everybody who could go on has."""
CONFIG = TransactionConfig(coordinators=1, retention_seconds=20, max_timeout_seconds=3600)


class Died(Exception):
    """A process is gone, or an answer is."""


class Choices:
    """What happens next: as the list says, then by chance."""

    def __init__(self, script: Sequence[int], seed: int) -> None:
        self._script = list(reversed(script))
        self._random = random.Random(seed)

    def pick(self, count: int) -> int:
        return self._script.pop() % count if self._script else self._random.randrange(count)

    def is_lucky(self, one_in: int) -> bool:
        return one_in > 0 and self.pick(one_in) == one_in - 1


class Store:
    """Records in memory; every call waits for its turn, and writes may have an unknown outcome."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.records: dict[str, Record] = {}
        self._version = 0

    async def get(self, key: str, *, partition: str | None = None, fresh: bool = False) -> Record | None:
        await self._world.turn()
        return self.records.get(key)

    async def put(
        self, key: str, value: bytes, *, expected: int, partition: str | None = None, index: Mapping[str, str] | None = None
    ) -> Record:
        def apply() -> Record:
            old = self.records.get(key)
            if (ABSENT if old is None else old.version) != expected:
                raise VersionConflict(key)
            self._version += 1
            made = self.records[key] = Record(key, value, self._version, 0, 0, 0, index=index or {})
            self._world.wrote(made)
            return made

        return await self._write(apply)

    async def append(self, prefix: str, value: bytes, *, partition: str, index: Mapping[str, str] | None = None) -> Record:
        def apply() -> Record:
            self._version += 1
            key = f"{prefix}-{records.padded(self._world.next_number(prefix))}"
            made = self.records[key] = Record(key, value, self._version, 0, 0, 0, index=index or {})
            return made

        return await self._write(apply)

    async def delete(self, key: str, *, expected: int | None = None, partition: str | None = None) -> bool:
        def apply() -> bool:
            old = self.records.get(key)
            if expected is not None and (old is None or old.version != expected):
                raise VersionConflict(key)
            return self.records.pop(key, None) is not None

        return await self._write(apply)

    async def delete_span(self, span: Span, *, partition: str | None = None) -> None:
        await self._world.turn()
        for record in self._in(span):
            del self.records[record.key]

    async def names(self, span: Span, *, partition: str | None = None, fresh: bool = False) -> AsyncIterator[str]:
        await self._world.turn()
        for record in self._in(span):
            yield record.name

    async def scan(
        self, span: Span | IndexSpan, *, partition: str | None = None, limit: int | None = None, fresh: bool = False
    ) -> AsyncIterator[Record]:
        await self._world.turn()
        for record in self._in(span)[:limit]:
            yield record

    def _in(self, span: Span | IndexSpan) -> list[Record]:
        if isinstance(span, Span):
            return [self.records[key] for key in sorted(self.records) if key.rpartition("/")[0] == span.parent]
        found = [
            (each.index[span.name], each.key)
            for each in self.records.values()
            if span.name in each.index
            and (span.lo is None or each.index[span.name] >= span.lo)
            and (span.hi is None or each.index[span.name] < span.hi)
        ]
        return [self.records[key] for _, key in sorted(found)]

    async def _write(self, apply: Callable[[], T]) -> T:
        await self._world.turn()
        if self._world.is_unknown():
            kind = self._world.choices.pick(3)
            if kind == 0:
                self._quietly(apply)
            elif kind == 1:
                self._world.spawn(self._late(apply))
            raise OutcomeUnknown("no verdict")
        return apply()

    async def _late(self, apply: Callable[[], object]) -> None:
        await self._world.turn()
        self._quietly(apply)

    @staticmethod
    def _quietly(apply: Callable[[], object]) -> None:
        try:
            apply()
        except VersionConflict:
            pass


class Clock:
    """Time in milliseconds."""

    def __init__(self) -> None:
        self.ms = 1_000_000

    def now_ms(self) -> int:
        return self.ms

    def monotonic(self) -> float:
        return self.ms / 1000


class Broker:
    """What a broker has for sinks, and the two parts of a log's owner."""

    def __init__(self, world: World, sinks: type[Sinks]) -> None:
        self.world = world
        metadata: Any = world.store
        clock: Any = world.clock
        self.store = TransactionStore(metadata, clock)
        self.coordinator = TransactionCoordinator(self.store, clock, CONFIG)
        self.sinks = sinks(self.store, self.coordinator, clock, CONFIG)
        leader: Any = self
        self.sweeps = TransactionSweeps(self.store, self.coordinator, leader, clock, CONFIG, self._load, self.sinks)

    def leads(self, _number: int) -> bool:
        return True

    async def _load(self, _segment: str) -> bool:
        await self.materialise()
        return True

    async def send(self, txn: TxnId, row: Row) -> None:
        """Op, header, entry (INV10, INV11)."""
        op = await self.store.append_op(txn, TxnOp(kind="write", segment="s", position="0:0"))
        self.world.in_flight.add(op.key)
        try:
            header = await self.store.header(txn.root, fresh=True)
            if header is not None and header.value.is_open:
                self.world.entries[op.key] = row
                return
        finally:
            self.world.in_flight.discard(op.key)
        await self.store.delete_op(op)
        raise TransactionConflict(str(txn))

    async def materialise(self) -> None:
        """What is decided becomes visible or not, for good; then its op goes (INV12)."""
        world = self.world
        for op in await self.store.writes_in("s"):
            header = await self.store.header(op.txn.root, fresh=True)
            if op.key in world.in_flight or (header is not None and header.value.is_open):
                continue
            if op.key not in world.materialised:
                assert header is not None or op.key not in world.entries, "a header went before its ops"
                if op.key in world.entries and header is not None and header.value.outcome(op.txn.sub) == "COMMITTED":
                    world.visible[world.entries[op.key]] += 1
                world.materialised.add(op.key)
            await self.store.delete_op(op)


class World:
    """Everything, and the order of it."""

    def __init__(self, choices: Choices, sinks: type[Sinks] = Sinks, *, unknown_one_in: int = 25) -> None:
        self.choices = choices
        self.unknown_one_in = unknown_one_in
        self.clock = Clock()
        self.store = Store(self)
        self.brokers = [Broker(self, sinks) for _ in range(2)]
        self.checkpoint = 0
        self.runs = 0
        self.chaos = 30
        """Bad things that may still happen."""
        self.unknowns = 12
        """Writes whose outcome may still be unknown."""
        self.left_unknown = 0
        """Of these, at the end."""
        self.entries: dict[str, Row] = {}
        self.in_flight: set[str] = set()
        self.materialised: set[str] = set()
        self.visible: Counter[Row] = Counter()
        self.committed: dict[int, str] = {}
        self.happened: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._waiting: list[asyncio.Future[None]] = []
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failure: BaseException | None = None

    # Order.

    async def turn(self) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        await mine

    def is_unknown(self) -> bool:
        """A write has no verdict."""
        if self.unknowns <= 0 or not self.choices.is_lucky(self.unknown_one_in):
            return False
        self.unknowns -= 1
        return True

    def is_lucky(self, one_in: int) -> bool:
        """Something bad happens now."""
        if self.chaos <= 0 or not self.choices.is_lucky(one_in):
            return False
        self.chaos -= 1
        return True

    def spawn(self, work: Awaitable[T]) -> asyncio.Task[T]:
        task: asyncio.Task[T] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, BraidError | Died):
            self._failure = self._failure or error

    def next_number(self, prefix: str) -> int:
        self._numbers[prefix] += 1
        return self._numbers[prefix]

    def wrote(self, record: Record) -> None:
        """No batch is committed twice, and none before the one below it."""
        if not record.key.startswith(f"{records.HEADERS}/"):
            return
        header = records.decode_header(record.key, record.value)
        if header.state == "COMMITTED" and header.batch is not None:
            assert self.committed.setdefault(header.batch, record.key) == record.key, f"batch {header.batch} is committed twice"
            assert header.batch == 0 or header.batch - 1 in self.committed, "a batch was left out"

    async def run(self) -> None:
        """Until the job is done, then until nothing is left of it."""
        driver: asyncio.Task[None] | None = None
        resting: asyncio.Task[None] | None = None
        steps = 0
        while self.checkpoint < BATCHES or self._tasks:
            steps += 1
            assert steps < 60_000, "it does not end"
            if driver is not None and driver.done() and resting is None and self.is_lucky(3):
                resting = self.spawn(self._rest())
            if (
                self.checkpoint < BATCHES
                and (resting is None or resting.done())
                and (driver is None or driver.done() or self.is_lucky(80))
            ):
                driver, resting = self._start(), None
            await self._step(driver)
        await self._end()

    async def _step(self, driver: asyncio.Task[None] | None) -> None:
        if driver is not None and self.is_lucky(150):
            driver.cancel()
            self.happened["driver killed"] += 1
        if self.is_lucky(100):
            self.clock.ms += [10_000, 21_000, 61_000][self.choices.pick(3)]
            self.happened["time passes"] += 1
        if self.is_lucky(40):
            self.spawn(self._sweep(self.choices.pick(2)))
        await self._go_on()

    async def _go_on(self) -> None:
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if self._failure is not None:
            raise self._failure
        self._waiting = [each for each in self._waiting if not each.done()]
        if self._waiting:
            self._waiting.pop(self.choices.pick(len(self._waiting))).set_result(None)

    async def _sweep(self, who: int) -> None:
        broker = self.brokers[who]
        await broker.sweeps.abort_expired()
        await broker.materialise()
        await broker.sweeps.collect()

    async def _rest(self) -> None:
        """Nobody starts the job again for so long that what ended is collected."""
        self.happened["rest"] += 1
        for _ in range(2):
            self.clock.ms += 21_000
            await self._sweep(0)

    async def _end(self) -> None:
        self.left_unknown = self.unknowns
        self.chaos = self.unknowns = 0
        for _ in range(3):
            self.clock.ms += 2 * TIMEOUT_MS
            sweep = self.spawn(self._sweep(0))
            while not sweep.done():
                await self._go_on()
        await self._go_on()
        view = self.spawn(self.brokers[0].sinks.look(SINK))
        while not view.done():
            await self._go_on()
        found = view.result()
        assert found is not None and found.sink.value.last == BATCHES - 1, "the sink does not know what it has"
        left = [key for key in self.store.records if not key.startswith((records.SINKS, records.SERIALS))]
        assert left == [], f"something stays for ever: {left}"
        assert self.visible == Counter(rows(range(BATCHES))), "not exactly once"

    async def abandon(self) -> None:
        """Nobody goes on."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # The job.

    def _start(self) -> asyncio.Task[None]:
        self.runs += 1
        assert self.runs < 100, "no run gets through"
        return self.spawn(self._driver(f"run {self.runs}"))

    async def _driver(self, run: str) -> None:
        while (batch := self.checkpoint) < BATCHES:
            parts = [self.spawn(self._part(SinkBatch(SINK, batch, run), number)) for number in range(PARTITIONS)]
            messages = [await each for each in parts]
            await self._commit(SinkBatch(SINK, batch, run), [each for each in messages if each is not None])
            await self.turn()  # the commit log
            if self.is_lucky(8):
                self.happened["driver died after the decision"] += 1
                raise Died
            self.checkpoint = max(self.checkpoint, batch + 1)

    async def _commit(self, of: SinkBatch, subs: list[TxnId]) -> None:
        if not subs:
            return
        assert len({each.root for each in subs}) == 1, "one batch of one run has two deciders"
        root, winners = subs[0].root, [each.sub for each in subs]
        try:
            await self._ask(lambda broker: broker.coordinator.decide(root, winners))
        except (InvalidTransactionStatus, TransactionNotFound):
            view = await self._ask(lambda broker: broker.sinks.look(of.sink))
            is_there = view is not None and (
                (view.last is not None and view.last >= of.batch) or (view.open is not None and view.open.batch > of.batch)
            )
            if not is_there:
                self.happened["lost"] += 1
                raise
            self.happened["duplicate commit"] += 1

    async def _part(self, of: SinkBatch, number: int) -> TxnId | None:
        """The message of one attempt, of several that may run at the same time; Spark takes the first."""
        failure: BaseException | None = None
        for _attempt in range(3):
            attempts = [self.spawn(self._attempt(of, number))]
            if self.is_lucky(8):
                self.happened["speculation"] += 1
                attempts.append(self.spawn(self._attempt(of, number)))
            done, _others = await asyncio.wait(attempts, return_when=asyncio.FIRST_COMPLETED)
            first = next(each for each in attempts if each in done)
            if (failure := first.exception()) is None:
                return first.result()
        raise failure or Died

    async def _attempt(self, of: SinkBatch, number: int) -> TxnId | None:
        root = await self._ask(lambda broker: broker.sinks.begin(of, TIMEOUT_MS))
        if root is None:
            self.happened["duplicate begin"] += 1
            return None
        sub = await self._ask(lambda broker: broker.coordinator.new_sub(root))
        for row in rows([of.batch], [number]):
            await self._ask(lambda broker, row=row: broker.send(sub, row), may_repeat=False)  # type: ignore[misc]
            if self.is_lucky(8):
                self.happened["attempt died"] += 1
                raise Died
        return sub

    async def _ask(self, call: Callable[[Broker], Awaitable[T]], *, may_repeat: bool = True) -> T:
        """A request to a broker, which goes on with it although nobody may wait for the answer any more."""
        while True:
            answer = self.spawn(call(self.brokers[self.choices.pick(2)]))
            if self.is_lucky(12):
                self.happened["answer lost"] += 1
                for _ in range(self.choices.pick(6)):
                    await self.turn()
                if not may_repeat:
                    raise Died
                continue
            try:
                return await asyncio.shield(answer)
            except StoreError:
                if not may_repeat:
                    raise
                self.happened["asked again"] += 1
                await self.turn()


def rows(batches: Any, numbers: Any = range(PARTITIONS)) -> list[Row]:
    return [(batch, number, row) for batch in batches for number in numbers for row in range(ROWS)]


def play(script: Sequence[int], seed: int, sinks: type[Sinks] = Sinks, *, unknown_one_in: int = 25) -> World:
    """One story from begin to end; raises AssertionError if something went wrong in it."""

    async def main() -> World:
        world = World(Choices(script, seed), sinks, unknown_one_in=unknown_one_in)
        try:
            await world.run()
        finally:
            await world.abandon()
        return world

    return asyncio.run(main())
