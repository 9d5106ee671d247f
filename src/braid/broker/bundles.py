"""`BundleTable`: who holds which bundle and which one is on its way to whom, as far as this broker has heard.

Owns the keys and values of the locks (`/namespace/<tenant>/<namespace>/<bundle>`, ephemeral) and of the hand-over hints
(`/loadbalance/hints/...`): a hint asks the holder of a bundle to give it up and the broker it names to take it. For counting
and for choosing only (INV15): who holds a bundle is decided by creating its lock, who may write to a log by the log (INV2).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection

import msgspec

from braid.broker.mirror import Mirror
from braid.broker.registry import BrokerInfo
from braid.errors import Rejected, StoreError, VersionConflict
from braid.metadata.api import MetadataStore, Record
from braid.metadata.names import encode_name
from braid.model.bundles import Bundle
from braid.model.names import NamespaceName
from braid.runtime.clock import Clock
from braid.runtime.tasks import Tasks

log = logging.getLogger(__name__)
LOCKS = "/namespace"
HINTS = "/loadbalance/hints"
PROMISE_SECONDS = 5.0
"""How long a bundle counts for the broker a client was sent to, before that broker has taken it."""


class BundleLock(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The value of a bundle's lock."""

    broker_id: str
    native_url: str
    http_url: str
    incarnation: str
    disabled: bool = False
    """Being given up: nobody is sent there any more."""

    def as_broker(self) -> BrokerInfo:
        """The holder, for a caller that finds it in no registry."""
        return BrokerInfo(
            broker_id=self.broker_id, service_url=self.native_url, http_url=self.http_url, incarnation=self.incarnation
        )


class Hint(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """Where a bundle shall go."""

    broker_id: str


def lock_key(namespace: NamespaceName, bundle: Bundle) -> str:
    return f"{LOCKS}/{encode_name(namespace.tenant)}/{encode_name(namespace.local_name)}/{bundle}"


def hint_key(key: str) -> str:
    """The hint that belongs to a lock."""
    return HINTS + key.removeprefix(LOCKS)


def bundle_of(key: str) -> tuple[NamespaceName, Bundle] | None:
    """Namespace and bundle of a lock's key; None if it is no such key."""
    parts = key.split("/")
    try:
        return NamespaceName.parse("/".join(parts[2:-1])), Bundle.parse(parts[-1])
    except Rejected:
        return None


def parse_lock(key: str, value: bytes) -> BundleLock | None:
    """The value of a lock's record; None if it is something else."""
    try:
        return msgspec.json.decode(value, type=BundleLock)
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("the record %s is no bundle's lock: %s", key, error)
        return None


def decode_lock(record: Record) -> BundleLock | None:
    return parse_lock(record.key, record.value)


def _decode_hint(record: Record) -> Hint | None:
    try:
        return msgspec.json.decode(record.value, type=Hint)
    except (msgspec.MsgspecError, ValueError) as error:
        log.warning("the record %s is no hint: %s", record.key, error)
        return None


class BundleTable:
    """See the module. Keys are those of the locks."""

    def __init__(self, metadata: MetadataStore, clock: Clock, changed: Callable[[], None]) -> None:
        self._metadata = metadata
        self._clock = clock
        self._owners = Mirror(metadata, clock, LOCKS, decode_lock, changed)
        self._hints = Mirror(metadata, clock, HINTS, _decode_hint, changed)
        self._promises: dict[str, tuple[str, float]] = {}

    async def start(self, tasks: Tasks) -> None:
        await self._owners.start(tasks)
        await self._hints.start(tasks)

    async def reload(self) -> None:
        await self._owners.reload()
        await self._hints.reload()

    def owner(self, key: str) -> BundleLock | None:
        return self._owners.values.get(key)

    def note_owner(self, key: str, value: BundleLock | None) -> None:
        """This broker took the bundle, or gave it up."""
        self._owners.note(key, value)
        self._promises.pop(key, None)

    def held_by(self, broker_id: str, incarnation: str) -> list[str]:
        """Bundles whose lock names this run of a broker."""
        return [
            key for key, lock in self._owners.values.items() if (lock.broker_id, lock.incarnation) == (broker_id, incarnation)
        ]

    def hints(self) -> dict[str, str]:
        """Bundles on their way, and to whom."""
        return {LOCKS + key.removeprefix(HINTS): hint.broker_id for key, hint in self._hints.values.items()}

    def promise(self, key: str, broker_id: str) -> None:
        """A client is on its way to that broker, which will take the bundle then."""
        self._promises[key] = (broker_id, self._clock.monotonic() + PROMISE_SECONDS)

    def promised(self, key: str) -> str | None:
        found = self._promises.get(key)
        return found[0] if found is not None and found[1] > self._clock.monotonic() else None

    def assigned(self, brokers: Collection[str]) -> dict[str, set[str]]:
        """The bundles of each of these brokers: held and not on their way to another, on their way to it, or promised."""
        now = self._clock.monotonic()
        self._promises = {key: promise for key, promise in self._promises.items() if promise[1] > now}
        places = {key: broker_id for key, (broker_id, _until) in self._promises.items()}
        places.update({key: lock.broker_id for key, lock in self._owners.values.items()})
        places.update({key: broker_id for key, broker_id in self.hints().items() if broker_id in brokers})
        found: dict[str, set[str]] = {broker_id: set() for broker_id in brokers}
        for key, broker_id in places.items():
            if broker_id in found:
                found[broker_id].add(key)
        return found

    async def hint(self, key: str) -> str | None:
        """Where the bundle shall go, asked of the store."""
        record = await self._metadata.get(hint_key(key))
        found = None if record is None else _decode_hint(record)
        return None if found is None else found.broker_id

    async def put_hint(self, key: str, broker_id: str) -> None:
        """Ask for a hand-over; a later wish replaces an earlier one."""
        hint = Hint(broker_id=broker_id)
        await self._metadata.put(hint_key(key), msgspec.json.encode(hint))
        self._hints.note(hint_key(key), hint)

    async def drop_hint(self, key: str) -> None:
        """The hand-over is done, or can never be. Best effort: a hint left behind is found again by the reconcile."""
        if hint_key(key) not in self._hints.values:
            return
        try:
            record = await self._metadata.get(hint_key(key))
            if record is not None:
                await self._metadata.delete(record.key, expected=record.version)
        except VersionConflict:
            return  # a newer wish
        except StoreError as error:
            log.info("the hint of %s stays for now: %s", key, error)
            return
        self._hints.note(hint_key(key), None)
