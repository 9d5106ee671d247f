"""`Registry`: which brokers live, and this broker's own entry among them.

Owns `/loadbalance/brokers/<brokerId>`: an ephemeral record per broker that names its addresses and its incarnation, so that it
goes with the broker's session. A broker that restarts under the same id replaces what its earlier incarnation left behind.
Being listed gives no right to anything: it tells others where to send clients (INV15: watched, and compared periodically).
"""

from __future__ import annotations

import asyncio
import logging

import msgspec

from braid.broker.mirror import Mirror
from braid.errors import NotReady, SessionLost
from braid.metadata.api import MetadataStore, Record
from braid.metadata.locks import LockBusy, ResourceLock, ResourceLocks
from braid.metadata.names import encode_name
from braid.metadata.tenure import RETRY_SECONDS
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)
START_ATTEMPTS = 5
ROOT = "/loadbalance/brokers"


class BrokerInfo(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A broker as the others know it."""

    broker_id: str
    """Host and HTTP port."""
    service_url: str
    http_url: str
    started_ms: int = 0
    version: str = ""
    incarnation: str = ""
    """Differs between two runs of the same broker id."""
    is_draining: bool = False


class Registry:
    """See the module."""

    def __init__(self, metadata: MetadataStore, clock: Clock, locks: ResourceLocks) -> None:
        self.me: BrokerInfo | None = None
        """What this broker says of itself; None before it is announced."""
        self._clock = clock
        self._locks = locks
        self._lock: ResourceLock | None = None
        self._turn = asyncio.Lock()
        self._was_registered = False
        self._has_left = False
        self._live = Mirror(metadata, clock, ROOT, _decode)

    @property
    def is_registered(self) -> bool:
        return self._lock is not None and self._lock.holds()

    def live(self) -> list[BrokerInfo]:
        """All brokers that are registered, by id."""
        return sorted(self._live.values.values(), key=lambda info: info.broker_id)

    def takers(self) -> list[BrokerInfo]:
        """Those of them that take bundles, by id."""
        return [info for info in self.live() if not info.is_draining]

    def get(self, broker_id: str) -> BrokerInfo | None:
        return self._live.values.get(broker_key(broker_id))

    async def start(self, me: BrokerInfo, tasks: Tasks) -> None:
        """Announce this broker and learn of the others."""
        self.me = me
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                await self.register()
                break
            except SessionLost:  # the start itself kept a busy machine longer than a session lasts
                if attempt == START_ATTEMPTS:
                    raise
                await self._clock.sleep(RETRY_SECONDS)  # for a heartbeat, which has to have its turn before the session is good
        await self._live.start(tasks)

    async def reload(self) -> None:
        await self._live.reload()

    async def register(self) -> None:
        """Make sure that our record is there. Raises NotReady if another live broker has our id, and the store's errors."""
        async with self._turn:
            me = self.me
            if me is None or self._has_left or self.is_registered:
                return
            key = broker_key(me.broker_id)
            # What an earlier run left behind goes at once; later on, two brokers of one id must not fight for ever.
            same = None if self._was_registered else lambda _value: True
            try:
                lock = await self._locks.acquire(key, msgspec.json.encode(me), same=same)
            except LockBusy as busy:
                raise NotReady(f"A broker named {me.broker_id} is registered already: {busy}") from None
            self._lock = lock
            self._was_registered = True
            self._live.note(key, me)

    async def update(self, *, is_draining: bool) -> None:
        """Tell the others whether we take bundles."""
        if self.me is None or self._lock is None:
            raise NotReady("The broker is not registered at the moment; try again.")
        me = msgspec.structs.replace(self.me, is_draining=is_draining)
        await self._lock.update(msgspec.json.encode(me))
        self.me = me
        self._live.note(broker_key(me.broker_id), me)

    async def close(self) -> None:
        """Leave the list, for good."""
        self._has_left = True
        async with self._turn:
            lock, self._lock = self._lock, None
            if lock is not None:
                await lock.release()


def broker_key(broker_id: str) -> str:
    return f"{ROOT}/{encode_name(broker_id)}"


def _decode(record: Record) -> BrokerInfo | None:
    try:
        return msgspec.json.decode(record.value, type=BrokerInfo)
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("the record %s is no broker's: %s", record.key, error)
        return None
