"""`Holdings`: the bundles this broker holds: taking their locks, giving them up, losing them.

Owns the order in which a bundle is given up, which is what makes a hand-over gentle: no new clients, topics closed, only then
the lock is released. Taking and giving up happen once however many ask, in tasks that a caller who goes away does not
interrupt: a lock without its entry here would serve nobody. Must not choose anything: that is `Ownership`'s business, and so is
the safety argument (`ownership.py`). It knows no topics, it asks its `BundleHost`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import msgspec

from braid.broker.bundles import BundleLock, BundleTable, lock_key, parse_lock
from braid.broker.registry import BrokerInfo
from braid.errors import BraidError, NotReady, SessionLost
from braid.metadata.locks import ResourceLock, ResourceLocks
from braid.model.bundles import Bundle
from braid.model.names import NamespaceName
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)
Step = Callable[[], Coroutine[Any, Any, None]]


class BundleHost(Protocol):
    """The topics of this broker."""

    async def close_bundle(self, namespace: NamespaceName, bundle: Bundle) -> None:
        """Close every topic of the bundle properly; returns when nothing of it is open or being opened."""
        ...

    def abandon_bundle(self, namespace: NamespaceName, bundle: Bundle) -> None:
        """Stop serving the bundle's topics at once and write nothing more."""
        ...


class Held:
    """A bundle whose lock this broker has."""

    __slots__ = ("bundle", "lock", "namespace", "unloading")

    def __init__(self, namespace: NamespaceName, bundle: Bundle, lock: ResourceLock) -> None:
        self.namespace = namespace
        self.bundle = bundle
        self.lock = lock
        self.unloading: asyncio.Task[None] | None = None

    @property
    def key(self) -> str:
        return self.lock.key

    @property
    def is_unloading(self) -> bool:
        return self.unloading is not None

    def serves(self) -> bool:
        """Whether its topics may be served now. Ask before each act and keep no answer."""
        return self.unloading is None and self.lock.holds()


class Holdings:
    """See the module."""

    def __init__(self, clock: Clock, locks: ResourceLocks, table: BundleTable, host: BundleHost, tasks: Tasks) -> None:
        self.moves = 0
        """Bundles given up on purpose since the start."""
        self.losses = 0
        """Bundles lost with a session or taken away."""
        self.takes_none = False
        """Set while the broker drains or stops."""
        self._clock = clock
        self._locks = locks
        self._table = table
        self._host = host
        self._tasks = tasks
        self._held: dict[NamespaceName, list[Held]] = {}
        self._acquiring: dict[str, asyncio.Task[Held | BraidError]] = {}

    def holding(self, namespace: NamespaceName, number: int) -> Held | None:
        """The held bundle of a namespace that a hash belongs to."""
        for held in self._held.get(namespace, ()):
            if held.bundle.contains(number):
                return held
        return None

    def at(self, namespace: NamespaceName, bundle: Bundle) -> Held | None:
        return next((held for held in self._held.get(namespace, ()) if held.bundle == bundle), None)

    def all(self, namespace: NamespaceName | None = None) -> list[Held]:
        if namespace is not None:
            return list(self._held.get(namespace, ()))
        return [held for some in self._held.values() for held in some]

    async def acquire(self, namespace: NamespaceName, bundle: Bundle, me: BrokerInfo) -> Held:
        """Take the lock. Raises LockBusy, NotReady (this broker takes none), and the store's errors."""
        key = lock_key(namespace, bundle)
        task = self._acquiring.get(key)
        if task is None:
            task = self._acquiring[key] = self._tasks.spawn(self._take(key, namespace, bundle, me), f"acquire {key}")
            task.add_done_callback(lambda _task: self._acquiring.pop(key, None))
        result = await asyncio.shield(task)
        if isinstance(result, BraidError):
            raise result
        return result

    async def settle(self) -> None:
        """Wait until no lock is being taken."""
        while self._acquiring:
            await asyncio.wait(list(self._acquiring.values()))

    async def _take(self, key: str, namespace: NamespaceName, bundle: Bundle, me: BrokerInfo) -> Held | BraidError:
        """An expected refusal is the task's result: nobody may be there any more to hear of it."""
        value = BundleLock(broker_id=me.broker_id, native_url=me.service_url, http_url=me.http_url, incarnation=me.incarnation)

        def is_earlier_run(stored: bytes) -> bool:
            found = parse_lock(key, stored)
            return found is not None and found.broker_id == me.broker_id and found.incarnation != me.incarnation

        try:
            lock = await self._locks.acquire(key, msgspec.json.encode(value), same=is_earlier_run)
            if self.takes_none:
                await lock.release()
                return NotReady(f"The broker {me.broker_id} takes no more bundles; look the topic up again.")
        except BraidError as error:
            return error
        held = Held(namespace, bundle, lock)
        lock.on_lost = lambda _lock: self._lock_lost(held)
        self._held.setdefault(namespace, []).append(held)
        self._table.note_owner(key, value)
        await self._table.drop_hint(key)
        return held

    async def give_up(self, held: Held, before_release: Step | None = None) -> None:
        """Close the bundle's topics, then release its lock; `before_release` is the last thing done under it."""
        if held.unloading is None:
            held.unloading = self._tasks.spawn(self._release(held, before_release), f"unload {held.key}")
        await asyncio.shield(held.unloading)

    def give_up_soon(self, held: Held) -> None:
        """The same, without waiting, and once more if an earlier attempt failed; a failure is logged."""
        if held.unloading is None or held.unloading.done():
            held.unloading = self._tasks.spawn(self._release(held, None), f"unload {held.key}")

    async def _release(self, held: Held, before_release: Step | None) -> None:
        lock = held.lock
        value = msgspec.json.decode(lock.value, type=BundleLock)
        try:
            await lock.update(msgspec.json.encode(msgspec.structs.replace(value, disabled=True)))
        except SessionLost:
            self.lost(held)
            return
        except BraidError as error:
            log.info("others do not know yet that %s is being unloaded: %s", held.key, error)
        await self._host.close_bundle(held.namespace, held.bundle)
        try:
            if before_release is not None:
                await before_release()
        finally:
            try:
                await lock.release()
            finally:
                if self._forget(held):
                    self._table.note_owner(held.key, None)
                    self.moves += 1

    def lost(self, held: Held) -> None:
        """The lock is not ours any more, or we cannot tell: somebody else may serve the bundle already. Idempotent."""
        if self._forget(held):
            self.losses += 1
            self._locks.lose(held.lock)  # for good: a session that recovers must not leave a lock whose bundle nobody serves
            self._table.note_owner(held.key, None)
            self._host.abandon_bundle(held.namespace, held.bundle)

    def clear(self) -> None:
        """Forget everything, without a word to anybody."""
        self._held.clear()

    def _lock_lost(self, held: Held) -> None:
        if self.at(held.namespace, held.bundle) is held:
            self._tasks.spawn(self._lost_soon(held), f"lost {held.key}")

    async def _lost_soon(self, held: Held) -> None:
        await self._clock.sleep(0)  # a broker whose clock stands still notices nothing
        self.lost(held)

    def _forget(self, held: Held) -> bool:
        some = self._held.get(held.namespace, [])
        if held not in some:
            return False
        some.remove(held)
        if not some:
            del self._held[held.namespace]
        return True
