"""`ResourceLocks`: who serves what, as ephemeral records that their holder may update.

Owns the lock records of one holder (a broker): acquires, updates and releases them, and tells when one is lost. Unlike an
election nobody waits: a busy lock is an answer that names its holder. A lock tells whom to ask; who may write is decided
elsewhere, by an epoch inside a CAS (INV2, INV4), so a holder that woke up late does no harm.

A lock is lost when its session is, when `good_until` passed, or when its record is gone or was written by somebody else; a lost
lock is never deleted, its record may be a successor's. Watches are hints: every lock is also looked at each
`reconcile_seconds` (INV15). The same round removes records that a failed, cancelled or unclear call may have left behind.
One `ResourceLocks` per handle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from braid.errors import Closed, InvariantBroken, OutcomeUnknown, SessionLost, StoreError, StoreUnavailable, VersionConflict
from braid.metadata.api import MetadataStore, Record
from braid.metadata.tenure import DEFAULT_RECONCILE_SECONDS, RETRY_SECONDS, Tenure, remove, take
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)

ATTEMPTS = 10
"""Of one call whose record changes under it, before it is answered with StoreUnavailable."""


class LockBusy(StoreError):
    """Somebody holds the lock; `record` says who."""

    status = 409

    def __init__(self, record: Record) -> None:
        super().__init__(f"The lock {record.key} is taken; ask the holder that its record names.")
        self.record = record


class ResourceLock:
    """One lock that was acquired."""

    __slots__ = ("_answered", "_asked", "_change", "_locks", "_tenure", "epoch", "key", "on_lost", "value")

    def __init__(self, locks: ResourceLocks, tenure: Tenure, value: bytes) -> None:
        self.key = tenure.key
        self.value = value
        self.epoch = tenure.epoch
        """Strictly larger for every later holder of the same lock; updates keep it."""
        self.on_lost: Callable[[ResourceLock], None] | None = None
        """Called once if the lock is lost rather than released."""
        self._locks = locks
        self._tenure = tenure
        self._change = asyncio.Lock()  # outside of it, the tenure's version is the record's
        self._asked = self._answered = 0  # looks at the record: begun, and the last one that was answered

    def holds(self) -> bool:
        """Whether we hold it now. Ask before each act and keep no answer."""
        return self._tenure.holds()

    async def update(self, value: bytes) -> None:
        """Replace the value. Raises SessionLost if the lock is no longer ours, StoreUnavailable (nothing changed), or
        OutcomeUnknown if reading back failed too."""
        tenure, store = self._tenure, self._locks.store
        async with self._change:
            for _attempt in range(ATTEMPTS):
                if not tenure.holds():
                    raise SessionLost(f"The lock {self.key} is no longer held, so it was not updated.")
                try:
                    record: Record | None = await store.put(self.key, value, expected=tenure.version, ephemeral=True)
                except (OutcomeUnknown, VersionConflict) as unsettled:
                    record = await _read_back(store, self.key, unsettled)
                if record is None or not tenure.follows(record):
                    self._locks.lose(self)
                    raise SessionLost(f"The lock {self.key} was taken away before it was updated.")
                self.value = record.value
                if record.value == value:
                    return
        raise StoreUnavailable(f"The metadata store did not take the update of {self.key} in {ATTEMPTS} attempts.")

    async def release(self) -> None:
        """Give it up; fine if it is lost. The record is gone afterwards, or soon if the store cannot be reached."""
        self._tenure.is_over = True  # before the record goes, so that no successor overlaps
        async with self._locks.turn(self.key), self._change:
            await self._locks.give_up(self, self._tenure)

    async def check(self) -> bool:
        """Look at the record: still held? Many callers at the same time share one look that began after they asked."""
        asked = self._asked
        async with self._change:
            if self._tenure.is_over:
                return False
            if self._tenure.has_lapsed():
                self._locks.lose(self)
                return False
            if self._answered > asked:
                return True
            self._asked = number = self._asked + 1
            record = await self._locks.store.get(self.key, fresh=True)
            self._answered = number
            if record is None or not self._tenure.follows(record):
                self._locks.lose(self)
            else:
                self.value = record.value
            return not self._tenure.is_over

    def end(self) -> None:
        """From now on it is not held, whatever becomes of the record. Only for `ResourceLocks`."""
        self._tenure.is_over = True

    def seconds_left(self) -> float:
        """Until the session must be renewed."""
        return self._tenure.seconds_left()


class ResourceLocks:
    """All locks of one handle. `acquire` and `close` are for users, the rest is for the locks themselves."""

    def __init__(self, store: MetadataStore, clock: Clock, *, reconcile_seconds: float = DEFAULT_RECONCILE_SECONDS) -> None:
        self.store = store
        self._clock = clock
        self._reconcile = reconcile_seconds
        self._locks: dict[str, ResourceLock] = {}
        self._listeners: dict[str, asyncio.Task[None]] = {}
        self._turns: dict[str, asyncio.Event] = {}  # keys that somebody acquires, releases or tidies up
        self._doubts: dict[str, float] = {}  # keys whose record may be an unwanted one of ours, and since when
        self._hint = asyncio.Event()
        self._tasks = Tasks("locks")
        self._minder: asyncio.Task[None] | None = None
        self._is_closed = False

    async def acquire(self, key: str, value: bytes, *, same: Callable[[bytes], bool] | None = None) -> ResourceLock:
        """Take the lock or raise LockBusy. `value` must name this incarnation of the holder. `same` recognises a record that an
        earlier incarnation left behind; it is removed by version instead of waiting for its session to end.

        Raises SessionLost or StoreUnavailable (not acquired), OutcomeUnknown if even reading back failed.
        """
        async with self.turn(key):
            if self._is_closed:
                raise Closed(f"The locks were closed before {key} was acquired.")
            if self._minder is None:
                self._minder = self._tasks.spawn(self._mind(), "mind")
            held = self._locks.get(key)
            if held is not None and await held.check() and (record := await self.store.get(key, fresh=True)) is not None:
                raise LockBusy(record)
            tenure = await self._take(key, value, same)
            lock = ResourceLock(self, tenure, value)
            if self._is_closed:
                await remove(self.store, self._clock, key, tenure.version, tenure.session)
                raise Closed(f"The locks were closed while {key} was acquired.")
            if key in self._locks:
                self._forget(self._locks[key])  # one that ended and is still being released
            self._locks[key] = lock
            self._listeners[key] = self._tasks.spawn(self._listen(lock), f"listen {key}")
        if len(self._locks) == 1:
            self._hint.set()  # the first one begins the rounds; all locks of a session have the same deadline
        return lock

    async def close(self) -> None:
        """Release everything and stop. Idempotent."""
        self._is_closed = True
        await asyncio.gather(*[lock.release() for lock in list(self._locks.values())])
        await self._tasks.close()
        try:
            await self._tidy_up()
        except (StoreError, Closed) as error:
            log.warning("locks that may have been left behind stay until their session ends: %s", error)

    def abandon(self) -> None:
        """Stop at once and leave everything as it is, as a killed process would; the records go with the session."""
        self._is_closed = True
        self._tasks.cancel()

    async def _take(self, key: str, value: bytes, same: Callable[[bytes], bool] | None) -> Tenure:
        for _attempt in range(ATTEMPTS):
            was_ours = key in self._doubts  # a record of ours is made anew: it may be that of a lock we gave up for lost
            self.doubt(key)  # until the outcome is known: the caller may be cancelled
            try:
                result = await take(self.store, self._clock, key, value)
            except OutcomeUnknown:
                raise
            except StoreError:
                if not was_ours:
                    self._doubts.pop(key, None)  # nothing was written
                raise
            if isinstance(result, Tenure):
                if not result.holds():
                    raise SessionLost(f"The session ended while the lock {key} was acquired.")
                return result
            if result is None:
                continue
            is_mine = result.owner == self.store.session.id
            if not (was_ours and is_mine) and not (same is not None and not is_mine and same(result.value)):
                raise LockBusy(result)
            try:
                await self.store.delete(key, expected=result.version)
            except (VersionConflict, OutcomeUnknown):
                continue  # the next attempt finds out
        raise StoreUnavailable(f"The lock {key} changed hands {ATTEMPTS} times while it was acquired; try again.")

    @asynccontextmanager
    async def turn(self, key: str) -> AsyncIterator[None]:
        """One at a time acquires, releases or tidies up a key. Taken before a lock's own `_change`, never after."""
        while (busy := self._turns.get(key)) is not None:
            await busy.wait()
        mine = self._turns[key] = asyncio.Event()
        try:
            yield
        finally:
            del self._turns[key]
            mine.set()

    async def give_up(self, lock: ResourceLock, tenure: Tenure) -> None:
        """Remove the record of a lock that ends."""
        if self._locks.get(lock.key) is not lock:
            return  # lost or released before
        self._forget(lock)
        self.doubt(lock.key)
        try:
            await remove(self.store, self._clock, lock.key, tenure.version, tenure.session)
        except Closed:
            self._doubts.pop(lock.key, None)  # the record went with the handle

    def lose(self, lock: ResourceLock) -> None:
        """The lock is not ours any more; its record is no longer our business."""
        if self._locks.get(lock.key) is not lock:
            return
        log.warning("the lock %s was lost", lock.key)
        lock.end()
        self._forget(lock)
        self.doubt(lock.key)  # a session renewed after its deadline still has the record
        if lock.on_lost is not None:
            try:
                lock.on_lost(lock)
            except Exception:  # a listener's mistake must not stop the round over the other locks
                log.exception("the listener of the lock %s failed", lock.key)

    def doubt(self, key: str) -> None:
        """There may be a record of ours at the key that nobody wants."""
        self._doubts[key] = self._clock.monotonic()

    def _forget(self, lock: ResourceLock) -> None:
        del self._locks[lock.key]
        self._listeners.pop(lock.key).cancel()

    async def _listen(self, lock: ResourceLock) -> None:
        """Look at the lock whenever its record moved."""
        while True:
            try:
                async with self.store.watch(lock.key) as events:
                    async for _event in events:
                        await lock.check()
            except StoreError as error:
                log.info("the watch on the lock %s ended and is set up again: %s", lock.key, error)
            except Closed:
                self.lose(lock)  # the handle is gone, and the record with it
                return
            except InvariantBroken:
                raise
            except Exception:
                log.exception("the watch on the lock %s failed and is set up again", lock.key)
            await self._clock.sleep(RETRY_SECONDS)

    async def _mind(self) -> None:
        """Look at everything from time to time, and at each session's deadline."""
        while True:
            delay = self._reconcile
            try:
                await self._check_all()
                await self._tidy_up()
            except StoreError as error:
                log.info("the locks wait for the metadata store: %s", error)
                delay = min(RETRY_SECONDS, delay)
            except Closed:
                return
            except InvariantBroken:
                raise
            except Exception:  # or nobody would ever look at any lock again
                log.exception("what locks may have left behind could not be removed, it is tried again")
            self._hint.clear()
            left = min([lock.seconds_left() for lock in self._locks.values() if lock.holds()], default=delay)
            timer = self._clock.call_later(max(0.0, min(delay, left)), self._hint.set)
            try:
                await self._hint.wait()
            finally:
                timer.cancel()

    async def _check_all(self) -> None:
        """Look at each lock. One that fails as nobody has foreseen keeps no other from it; the first of them is told."""
        failures = 0
        for lock in list(self._locks.values()):
            try:
                await lock.check()
            except (StoreError, Closed):
                raise  # it is the same with the others
            except InvariantBroken:
                raise
            except Exception:
                failures += 1
                if failures == 1:
                    log.exception("the lock %s could not be looked at and is looked at again", lock.key)
        if failures > 1:
            log.error("%d locks could not be looked at", failures)

    async def _tidy_up(self) -> None:
        """Remove records of ours that nobody wants, and forget doubts once what was under way has landed."""
        for key, since in list(self._doubts.items()):
            if key in self._turns:
                continue
            is_old = self._clock.monotonic() - since >= self._reconcile
            if key not in self._locks:
                async with self.turn(key):
                    record = await self.store.get(key, fresh=True)
                    if record is not None and record.owner == self.store.session.id:
                        is_old = await remove(self.store, self._clock, key, record.version, self.store.session)
            if is_old:
                self._doubts.pop(key, None)


async def _read_back(store: MetadataStore, key: str, unsettled: StoreError) -> Record | None:
    try:
        return await store.get(key, fresh=True)
    except StoreUnavailable as error:
        raise OutcomeUnknown(f"Whether {key} was updated is unknown, and it cannot be read: {error}") from unsettled
