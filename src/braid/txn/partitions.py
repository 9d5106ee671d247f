"""`CoordinatorPartitions`: which broker leads which coordinator partition, and this broker's candidacy for all of them.

Owns the elections at `/txn-tc/leader/<n>`, the record of how many there are, and a copy in memory of who leads. Leading a
partition tells clients where to go and makes one broker sweep; it gives no right: headers are decided by compare-and-swap, so a
change of leader needs no replay. What is shown may be old (INV15): it is watched, and compared every `reconcile_seconds`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import msgspec

from braid.errors import Closed, ConfigError, InvariantBroken, OutcomeUnknown, StoreError, VersionConflict
from braid.metadata.api import ABSENT, Delete, MetadataStore, Put, Span
from braid.metadata.election import LeaderElection, Leadership
from braid.metadata.tenure import DEFAULT_RECONCILE_SECONDS, RETRY_SECONDS
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks
from braid.txn import records

log = logging.getLogger(__name__)
ATTEMPTS = 5


class _Leader(msgspec.Struct, frozen=True, rename="camel"):
    """The value of a leader's record."""

    broker_id: str
    incarnation: str = ""


class CoordinatorPartitions:
    """One per broker."""

    def __init__(
        self,
        metadata: MetadataStore,
        clock: Clock,
        coordinators: int,
        *,
        broker_id: str,
        incarnation: str,
        reconcile_seconds: float = DEFAULT_RECONCILE_SECONDS,
    ) -> None:
        """`incarnation` differs between two runs of the same broker id."""
        self.parallelism = coordinators
        """How many there are: 0 to this less one."""
        self._metadata = metadata
        self._clock = clock
        self._broker_id = broker_id
        self._reconcile_seconds = reconcile_seconds
        self._leaders: dict[int, str] = {}
        self._listeners: dict[int, Callable[[], None]] = {}
        self._listened = 0
        self._tasks = Tasks("transaction coordinators")
        candidate = msgspec.json.encode(_Leader(broker_id=broker_id, incarnation=incarnation))
        self._elections = [self._election(number, candidate) for number in range(coordinators)]

    # What everybody may ask.

    def leads(self, number: int) -> bool:
        """Whether this broker leads a partition, now."""
        if not 0 <= number < self.parallelism:
            return False
        leadership = self._elections[number].leadership
        return leadership is not None and leadership.holds()

    def leader_of(self, number: int) -> str | None:
        """Broker id; None while nobody leads it, as far as known."""
        return self._leaders.get(number)

    def snapshot(self) -> dict[int, str]:
        """Broker ids of the partitions that have a leader, in order."""
        return dict(sorted(self._leaders.items()))

    def on_change(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` after each change of the snapshot, until the function that this returns is called."""
        self._listened += 1
        number = self._listened
        self._listeners[number] = listener

        def stop() -> None:
            self._listeners.pop(number, None)

        return stop

    # Life.

    async def start(self) -> None:
        """Agree on the number, campaign for all and learn who leads. Raises ConfigError if the cluster has another number."""
        await self._agree()
        async with asyncio.TaskGroup() as group:
            for election in self._elections:
                group.create_task(election.start())
        try:
            await self._reload()
        except StoreError as error:
            log.info("who leads the transaction coordinators will be known later: %s", error)
        self._tasks.spawn(self._follow(), "follow")
        self._tasks.spawn(self._reconcile(), "reconcile")

    async def close(self) -> None:
        """Resign from all and stop."""
        self._listeners.clear()
        await self._tasks.close()
        async with asyncio.TaskGroup() as group:
            for election in self._elections:
                group.create_task(election.close())

    def kill(self) -> None:
        """Stop at once and give up nothing, as a crash would."""
        self._listeners.clear()
        self._tasks.cancel()
        for election in self._elections:
            election.abandon()

    # The number of partitions.

    async def _agree(self) -> None:
        """The first broker writes it down; ids and lookups of clients depend on it."""
        text = str(self.parallelism).encode()
        for attempt in range(1, ATTEMPTS + 1):
            found = await self._metadata.get(records.PARALLELISM, fresh=True)
            if found is not None:
                recorded = found.value.decode(errors="replace")
                if not recorded.isdecimal():  # no broker wrote that, and all that run were told the same
                    log.warning("the record %s cannot be read: %r; it should be %d", found.key, recorded, self.parallelism)
                elif found.value != text:
                    raise ConfigError(
                        f"transactions.coordinators is {self.parallelism} here, but {recorded} was fixed when the first broker"
                        f" of this cluster started ({found.key}); set it to {recorded}."
                    )
                return
            try:
                await self._metadata.put(records.PARALLELISM, text, expected=ABSENT)
            except (VersionConflict, OutcomeUnknown):
                if attempt == ATTEMPTS:
                    raise

    # Who leads.

    def _election(self, number: int, candidate: bytes) -> LeaderElection:
        def changed(leadership: Leadership | None) -> None:
            if leadership is not None:  # sooner than the watch
                self._show(number, self._broker_id)

        return LeaderElection(
            self._metadata,
            self._clock,
            records.leader_path(number),
            candidate,
            on_change=changed,
            same=lambda value: _broker_id(value) == self._broker_id,
            reconcile_seconds=self._reconcile_seconds,
        )

    async def _follow(self) -> None:
        while True:
            try:
                async with self._metadata.watch(Span(records.COORDINATORS)) as events:
                    async for event in events:
                        if isinstance(event, Put):
                            self._show(_number(event.record.key), _broker_id(event.record.value))
                        elif isinstance(event, Delete):
                            self._show(_number(event.key), None)
            except Closed:
                return
            except StoreError as error:
                log.info("the watch on the leaders of transaction coordinators ended and is set up again: %s", error)
            except InvariantBroken:
                raise
            except Exception:
                log.exception("the watch on the leaders of transaction coordinators failed and is set up again")
            await self._clock.sleep(RETRY_SECONDS)

    async def _reconcile(self) -> None:
        while True:
            await self._clock.sleep(self._reconcile_seconds)
            try:
                await self._reload()
            except Closed:
                return
            except StoreError as error:
                log.info("the leaders of transaction coordinators cannot be compared with the store now: %s", error)
            except InvariantBroken:
                raise
            except Exception:  # or what no watch told would never be put right
                log.exception("the leaders of transaction coordinators could not be compared and are compared again")

    async def _reload(self) -> None:
        found: dict[int, str | None] = {}
        async for record in self._metadata.scan(Span(records.COORDINATORS), fresh=True):
            found[_number(record.key)] = _broker_id(record.value)
        for number in range(self.parallelism):
            self._show(number, found.get(number))

    def _show(self, number: int, broker_id: str | None) -> None:
        if self._leaders.get(number) == broker_id or not 0 <= number < self.parallelism:
            return
        if broker_id is None:
            del self._leaders[number]
        else:
            self._leaders[number] = broker_id
        for listener in list(self._listeners.values()):
            listener()


def _broker_id(value: bytes) -> str | None:
    try:
        return msgspec.json.decode(value, type=_Leader).broker_id
    except (msgspec.MsgspecError, ValueError):
        return None


def _number(key: str) -> int:
    name = key.rpartition("/")[2]
    return int(name) if name.isdecimal() else -1
