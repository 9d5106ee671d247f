"""W9: the metadata store under load: conditional writes, sequences, scans, index queries, watches, ephemerals, elections.

Processes use handles of their own on one store. Calls may fail or stay unanswered; the store may lose power, fill up, stall.
Watchers use plain handles, because the watch contract (C10) is the store's; candidates of the election lose every third
notification even after all faults have ended, because watches are hints to them (INV15).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from braid.errors import BraidError, Closed, StoreUnavailable, VersionConflict
from braid.metadata.api import ABSENT, Delete, IndexSpan, MetadataStore, Put, Span
from braid.metadata.election import LeaderElection
from braid.metadata.handle import Handle
from braid.runtime.env import Random
from braid.testing.sim import checkers, faults, watching
from braid.testing.sim.checkers import Violation
from braid.testing.sim.linearizable import ANY, CONFLICT, linearizable
from braid.testing.sim.loop import SimLoop
from braid.testing.sim.processes import Process
from braid.testing.sim.trouble import FlakyMetadata, Trouble
from braid.testing.sim.world import SESSION_SECONDS, World

ROOT = "/w9"
KEYS = [f"{ROOT}/k{number}" for number in range(6)]
COLOURS = ("red", "green")
LEADER = "/w9-leader"
CALL_SECONDS = 8.0
"""A call that takes longer is given up, its outcome unknown."""
LEADER_SECONDS = 2 * SESSION_SECONDS + 10.0
"""By when a new leader must be found: the old session ends, a reconcile comes, some tries."""
FAULTS = (
    "pause",
    "expire",
    "power-cut",
    "disk-stall",
    "disk-full",
    "disk-error",
    "sync-error",
    "store-refuses",
    "store-unknown",
    "store-slow",
    "client-crash",
)
BOUNDS = dict.fromkeys(("get", "put", "delete", "scan", "query", "sequence"), CALL_SECONDS + 2 * SESSION_SECONDS + 1.0)
"""Of a call; a paused process notices late that its time is up."""


class StoreProcess(Process):
    """A process with one handle; it lives in the process of the store and starts when that is open."""

    is_held = False
    """It may not start at the moment."""

    def start(self) -> None:
        if self.world.engine.home.is_dead or self.is_held:
            self.world.loop.call_later(0.5, self.start)
        else:
            super().start()

    async def _live(self) -> None:
        while not self.is_done:
            handle: Handle | None = None
            try:
                handle = self.world.engine.handle(self.name, clock=self.world.runtime(self.node).clock)
                await self.use(handle)
            except (BraidError, TimeoutError, OSError) as error:
                self.world.history.remark(f"{self.name}: {type(error).__name__}: {error}")
            await self._give_up(handle)
            while not self.is_done:
                await asyncio.sleep(0.3)
                if not self.is_held:
                    break

    async def use(self, handle: Handle) -> None:
        raise NotImplementedError

    async def _give_up(self, handle: Handle | None) -> None:
        if handle is None:
            return
        try:
            async with asyncio.timeout(CALL_SECONDS):
                await handle.close()
        except (BraidError, TimeoutError):
            return


class Writer(StoreProcess):
    """Random operations on a few keys."""

    def __init__(self, world: World, name: str, rng: Random, total: int) -> None:
        super().__init__(world, name)
        self._rng = rng
        self._left = total
        self._known: dict[str, tuple[int, str] | None] = {}
        self._count = 0

    async def use(self, handle: Handle) -> None:
        clock = self.world.runtime(self.node).clock
        store = FlakyMetadata(handle, clock, self.world.trouble_random, self.world.trouble)
        acts: list[Callable[[MetadataStore, str], Awaitable[None]]] = [
            self._get,
            self._put,
            self._put,
            self._swap,
            self._swap,
            self._swap,
            self._delete,
            self._scan,
            self._query,
            self._sequence,
            self._ephemeral,
            self._glance,
        ]
        while self._left > 0:
            self._left -= 1
            await asyncio.sleep(self._rng.expovariate(4.0))
            await self._rng.choice(acts)(store, self._rng.choice(KEYS))
        self.is_done = True

    async def _call(self, op: str, value: list[Any], call: Callable[[], Awaitable[Any]], *, reads: bool) -> tuple[str, Any]:
        """Do one call and write down how it ended; `conflict` is an answer."""
        number = self.world.history.invoke(self.name, op, value)
        try:
            async with asyncio.timeout(CALL_SECONDS):
                return str(number), await call()
        except VersionConflict:
            self.note("ok", op, [*value, CONFLICT], number=number)
            return "", None
        except (BraidError, TimeoutError) as error:
            certain = reads or isinstance(error, StoreUnavailable)
            self.note("fail" if certain else "info", op, value, number=number)
            if isinstance(error, Closed | TimeoutError):
                raise
            return "", None

    def _value(self) -> tuple[str, str]:
        self._count += 1
        colour = self._rng.choice(COLOURS)
        return f"{self.name}.{self.incarnation}.{self._count}.{colour}", colour

    async def _get(self, store: MetadataStore, key: str) -> None:
        number, record = await self._call("get", [key], lambda: store.get(key, fresh=True), reads=True)
        if number:
            self._known[key] = None if record is None else (record.version, record.value.decode())
            self.note("ok", "get", [key, None if record is None else record.value.decode()], number=int(number))

    async def _put(self, store: MetadataStore, key: str) -> None:
        await self._write(store, key, None, ANY)

    async def _swap(self, store: MetadataStore, key: str) -> None:
        if key not in self._known:
            await self._get(store, key)
        if key in self._known:
            known = self._known[key]
            await self._write(store, key, ABSENT if known is None else known[0], None if known is None else known[1])

    async def _write(self, store: MetadataStore, key: str, expected: int | None, believed: str | None) -> None:
        text, colour = self._value()
        value = [key, believed, text]
        self._known.pop(key, None)
        number, record = await self._call(
            "put", value, lambda: store.put(key, text.encode(), expected=expected, index={"colour": colour}), reads=False
        )
        if number:
            self._known[key] = (record.version, text)
            self.note("ok", "put", [*value, True], number=int(number))

    async def _delete(self, store: MetadataStore, key: str) -> None:
        known = self._known.pop(key, None)
        conditional = known is not None and self._rng.random() < 0.5
        version, believed = known if known is not None and conditional else (None, ANY)
        value = [key, believed]
        number, existed = await self._call("delete", value, lambda: store.delete(key, expected=version), reads=False)
        if number:
            self.note("ok", "delete", [*value, existed], number=int(number))

    async def _scan(self, store: MetadataStore, _key: str) -> None:
        async def read() -> dict[str, str]:
            return {record.key: record.value.decode() async for record in store.scan(Span(ROOT), fresh=True)}

        number, contents = await self._call("scan", [f"{ROOT}/k"], read, reads=True)
        if number:
            self.note("ok", "scan", [f"{ROOT}/k", contents], number=int(number))

    async def _query(self, store: MetadataStore, _key: str) -> None:
        colour = self._rng.choice(COLOURS)

        async def read() -> list[list[str]]:
            return [
                [each.key, each.value.decode()] async for each in store.scan(IndexSpan.exactly("colour", colour), fresh=True)
            ]

        number, records = await self._call("query", [colour], read, reads=True)
        if number:
            self.note("ok", "query", [colour, records], number=int(number))

    async def _sequence(self, store: MetadataStore, _key: str) -> None:
        prefix = f"{ROOT}-seq/s"
        number, record = await self._call("sequence", [prefix], lambda: store.append(prefix, b"", partition="seq"), reads=False)
        if number:
            self.note("ok", "sequence", [prefix, record.key], number=int(number))

    async def _ephemeral(self, store: MetadataStore, _key: str) -> None:
        await self._call(
            "ephemeral", [self.name], lambda: store.put(f"{ROOT}-eph/{self.name}", b"", ephemeral=True), reads=False
        )

    async def _glance(self, store: MetadataStore, key: str) -> None:
        """A watch that ends as soon as it has begun."""
        async with asyncio.timeout(CALL_SECONDS):
            try:
                async with store.watch(key) as events:
                    async for _event in events:
                        break
            except StoreUnavailable:
                return


class Watcher(StoreProcess):
    """Follows everything below the root and writes down what it is told."""

    async def use(self, handle: Handle) -> None:
        async with handle.watch(ROOT, recursive=True) as events:
            self.note("info", "watch")
            reading = self.world.spawn(self.node, self._read(events), self.name)
            while not self.is_stopping and not reading.done():
                await asyncio.sleep(0.2)
                async with handle.watch(ROOT + "/glance"):
                    await asyncio.sleep(0)  # a watch that ends as soon as it has begun
            reading.cancel()
            await asyncio.wait([reading])
        self.is_done = self.is_stopping

    async def _read(self, events: Any) -> None:
        try:
            async for event in events:
                if isinstance(event, Put):
                    self.note("info", "change", [event.record.key, event.record.version])
                elif isinstance(event, Delete):
                    self.note("info", "change", [event.key, None])
        except Closed:
            return


class Candidate(StoreProcess):
    """Stands for election for as long as it lives."""

    def __init__(self, world: World, name: str, trouble: Trouble) -> None:
        super().__init__(world, name)
        self._trouble = trouble
        self.election: LeaderElection | None = None
        self.resign = False

    async def use(self, handle: Handle) -> None:
        clock = self.world.runtime(self.node).clock
        metadata = FlakyMetadata(handle, clock, self.world.trouble_random, self._trouble)

        def changed(leadership: Any) -> None:
            if leadership is not None:
                self.note("info", "lead", [LEADER], epoch=leadership.epoch)

        name = f"{self.name}.{self.incarnation}.{self.world.loop.time()}"
        self.election = election = LeaderElection(metadata, clock, LEADER, name.encode(), on_change=changed)
        self.resign = False
        async with asyncio.timeout(CALL_SECONDS):
            await election.start()
        while not self.is_stopping and not self.resign:  # noqa: ASYNC110 - set by others, as often as they like
            await asyncio.sleep(0.2)
        self.election = None
        async with asyncio.timeout(2 * SESSION_SECONDS):
            await election.close()
        self.is_done = self.is_stopping

    def leads(self) -> bool:
        """Whether it would act as the leader now."""
        election = self.election
        if election is None or not self.is_running or self.node.is_paused:
            return False
        return election.leadership is not None and election.leadership.holds()


class Metadata:
    """W9."""

    def __init__(self, seed: int, loop: SimLoop, rng: Random) -> None:
        self.rng = rng
        self.world = World(seed, loop, brokers=0)
        self.history = self.world.history
        self.nemesis: faults.Nemesis | None = None
        self._lossy = Trouble(drop_every=3)
        self.writers = [
            Writer(self.world, f"w{number}", Random(rng.random()), rng.choice((40, 70)))
            for number in range(rng.choice((2, 3, 4)))
        ]
        self.watchers = [Watcher(self.world, f"v{number}") for number in range(2)]
        self.candidates = [Candidate(self.world, f"e{number}", self._lossy) for number in range(rng.choice((2, 3)))]

    @property
    def faults(self) -> int:
        return 0 if self.nemesis is None else self.nemesis.count

    @property
    def processes(self) -> list[Any]:
        return [*self.writers, *self.watchers, *self.candidates]

    async def run(self) -> None:
        world = self.world
        await world.start()
        self.nemesis = faults.Nemesis(
            world,
            self.rng,
            FAULTS,
            clients=lambda: [each.name for each in self.processes],
            crash=self._crash,
            pausable=lambda: [each.node for each in self.processes],
        )
        world.on_process_end = self._crash_all  # handles live in the process of their store
        for process in self.processes:
            process.start()
        monitor = world.loop.create_task(self._monitor())
        await self.nemesis.run(self.rng.uniform(10.0, 40.0))
        await self.nemesis.heal()
        for process in self.processes:
            world.resume_node(process.node)
        await self._finish("writers", self.writers)
        await self._elect()
        await asyncio.sleep(5.0)
        rows = world.engine.tables.rows
        self.history.add("world", "info", "state", {key: row[2] for key, row in rows.items() if key.startswith(ROOT + "/")})
        self.history.add("world", "info", "left", {"watches": len(world.engine.watches) - self._expected_watches()})
        for process in (*self.watchers, *self.candidates):
            process.is_stopping = True
        await self._finish("watchers and candidates", [*self.watchers, *self.candidates])
        monitor.cancel()
        await asyncio.sleep(2 * SESSION_SECONDS)
        self._note_left()
        await world.stop()

    def check(self) -> list[Violation]:
        events = self.history.events
        return [
            *(Violation("start", text) for text in self.world.failures),
            *linearizable(events),
            *watching.watch_contract(events),
            *watching.sequences_grow(events),
            *watching.index_agrees(events),
            *watching.one_leader(events),
            *checkers.terms_grow(events),
            *checkers.bounded_wait(events, bounds=BOUNDS, healing=300.0),
            *checkers.nothing_left(events),
        ]

    async def _elect(self) -> None:
        """While every third notification is lost, leaders resign or crash and others follow, within a bound."""
        held: Candidate | None = None
        for extra in self.candidates[2:]:  # one who leads and one who waits
            extra.is_held = True
            extra.crash()
        for round_number in range(6):
            until = self.world.loop.time() + LEADER_SECONDS
            while not (leaders := [each for each in self.candidates if each.leads()]):
                if self.world.loop.time() > until:
                    self.history.add("world", "info", "stalled", f"the election of leader {round_number}")
                    for candidate in self.candidates:
                        candidate.is_held = False
                    return
                await asyncio.sleep(0.25)
            if held is not None:
                held.is_held = False
            held = leaders[0]
            held.is_held = True  # it comes back when another leads: only those who wait can notice that it went
            if self.rng.random() < 0.5:
                held.crash()
            else:
                held.resign = True
            await asyncio.sleep(2.0)
        for candidate in self.candidates:
            candidate.is_held = False

    async def _monitor(self) -> None:
        while True:
            await asyncio.sleep(0.1)
            leaders = [each.name for each in self.candidates if each.leads()]
            if len(leaders) > 1:
                self.history.add("world", "info", "leaders", leaders)

    async def _finish(self, what: str, processes: list[Any]) -> None:
        until = self.world.loop.time() + 120.0
        while not all(each.is_done for each in processes):
            if self.world.loop.time() > until:
                self.history.add("world", "info", "stalled", f"{what} {[each.name for each in processes if not each.is_done]}")
                return
            await asyncio.sleep(0.5)
        self.history.add("world", "info", "finished", what)

    def _expected_watches(self) -> int:
        """One of each watcher and each candidate that is there."""
        return len(self.watchers) + sum(1 for each in self.candidates if each.is_running and each.election is not None)

    def _note_left(self) -> None:
        engine = self.world.engine
        left = {
            "watches": len(engine.watches),
            "sessions": len(engine._leases),
            "ephemerals": sum(1 for row in engine.tables.rows.values() if row[6] is not None),
        }
        self.history.add("world", "info", "left", left)

    def _crash_all(self) -> None:
        for process in self.processes:
            process.crash()

    def _crash(self, name: str) -> None:
        for process in self.processes:
            if process.name == name:
                process.crash()
