"""`CoordinatorWatches`: tells clients which broker serves which transaction coordinator partition (commands 79 to 81).

Owns the watches of this broker's clients. An update is always the full picture; a partition whose leader is not known at the
moment is left out, and clients keep what they knew of it. Watches are told of changes at once, and the picture is compared
every second (INV15), which also finds addresses that changed; while partitions are missing it is sent again each time. Must
not decide who leads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks
from braid.wire import messages
from braid.wire.commands import encode
from braid.wire.types import CommandType

COMPARE_SECONDS = 1.0


class CoordinatorWatch:
    """One client's watch."""

    __slots__ = ("_watches", "number", "told", "write")

    def __init__(self, watches: CoordinatorWatches, number: int, write: Callable[[bytes], None]) -> None:
        self.number = number
        self.write = write
        self.told: Mapping[int, str] | None = None
        self._watches = watches

    def close(self) -> None:
        self._watches.closed(self)


class CoordinatorWatches:
    """All of a broker. `picture` gives the service address of each partition's broker, as far as it is known."""

    def __init__(self, clock: Clock, parallelism: Callable[[], int], picture: Callable[[], Mapping[int, str]]) -> None:
        self._clock = clock
        self._parallelism = parallelism
        self._picture = picture
        self._watches: dict[CoordinatorWatch, None] = {}
        self._tasks = Tasks("coordinator watches")

    def __len__(self) -> int:
        return len(self._watches)

    def start(self) -> None:
        self._tasks.spawn(self._compare_loop(), "compare")

    async def close(self) -> None:
        await self._tasks.close()

    def kill(self) -> None:
        self._tasks.cancel()

    def open(self, number: int, write: Callable[[bytes], None]) -> CoordinatorWatch:
        """Told the present picture at once, and each later one."""
        watch = CoordinatorWatch(self, number, write)
        self._watches[watch] = None
        self._tell(watch, self._picture())
        return watch

    def closed(self, watch: CoordinatorWatch) -> None:
        self._watches.pop(watch, None)

    def changed(self) -> None:
        """Somebody else leads a partition: tell whoever was told otherwise."""
        if self._watches:
            self._tell_all(again=False)

    async def _compare_loop(self) -> None:
        while True:
            await self._clock.sleep(COMPARE_SECONDS)
            if self._watches:
                self._tell_all(again=True)

    def _tell_all(self, *, again: bool) -> None:
        picture = self._picture()
        again = again and len(picture) < self._parallelism()
        for watch in list(self._watches):
            if again or watch.told != picture:
                self._tell(watch, picture)

    def _tell(self, watch: CoordinatorWatch, picture: Mapping[int, str]) -> None:
        watch.told = picture
        update = messages.CommandWatchTcAssignmentsUpdate(watch_id=watch.number)
        update.snapshot.parallelism = self._parallelism()
        for number, url in sorted(picture.items()):
            update.snapshot.assignments.add(tc_id=number, broker_service_url=url)
        watch.write(encode(CommandType.WATCH_TC_ASSIGNMENTS_UPDATE, update))
