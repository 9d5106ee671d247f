"""`ManagedLedgerFactory`: opens, lists and deletes logs.

Owns the opening plan, whose order is the safety argument of INV2: claim the record by a CAS with a new owner epoch, fence the
last ledger, recompute what it holds, claim and load the cursors with fresh reads, then serve. Each step can be repeated.
A ledger that the record shows as closed was closed durably before; nobody can write it, so it is not opened again.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence

import msgspec

from braid.errors import BraidError, LedgerNotFound, NotReady, StoreMismatch, TopicNotFound, VersionConflict
from braid.managedledger.api import LedgerResolver, LogListener
from braid.managedledger.cache import EntryCache
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.cursor import ManagedCursor
from braid.managedledger.cursor_store import CursorStore
from braid.managedledger.deletion import finish_removal, remove_log
from braid.managedledger.log import NO_LIMITS, ManagedLedger, TrimGuard
from braid.managedledger.lost import content_of, given_up, lost, missing
from braid.managedledger.owned_record import OwnedRecord, swap
from braid.managedledger.reading import settled
from braid.managedledger.records import ROOT, LedgerInfo, LogRecord, decode_record, encode_record, log_key
from braid.managedledger.retention import Limits
from braid.managedledger.topic_names import topic_of
from braid.metadata.api import ABSENT, MetadataStore, Span
from braid.metadata.names import decode_name
from braid.metadata.values import unreadable
from braid.model.positions import Position
from braid.model.retention import RetentionPolicies
from braid.runtime.env import Runtime

log = logging.getLogger(__name__)
CLAIM_ATTEMPTS = 10


class ManagedLedgerFactory:
    """The logs of one broker. Opening a log twice at the same time is up to the caller to avoid; the later one wins."""

    def __init__(
        self,
        runtime: Runtime,
        metadata: MetadataStore,
        resolver: LedgerResolver,
        config: ManagedLedgerConfig,
        cache: EntryCache,
        on_claim: Callable[[str, Collection[int]], None] | None = None,
    ) -> None:
        self._runtime = runtime
        self._metadata = metadata
        self._resolver = resolver
        self._config = config
        self._cache = cache
        self._on_claim = on_claim
        """Told the key of each record of a log or cursor that was claimed, and the ledgers it named then."""

    async def open(
        self,
        name: str,
        listener: LogListener,
        *,
        create: bool,
        properties: Mapping[str, str] | None = None,
        limits: Limits = NO_LIMITS,
        policy: RetentionPolicies | None = None,
        readable: Callable[[], Position] | None = None,
        trim_guard: TrimGuard | None = None,
        confirm: Callable[[], Awaitable[None]] | None = None,
    ) -> ManagedLedger:
        """Take over the log `name` and load it. `properties` are those of a log created by this call. What keeps messages (the
        `limits`, a `policy` that stands elsewhere than in the log's record, what `readable` leaves to open transactions, the
        guard) holds from the start: the first trim may come at once.
        `confirm` is asked once the log is claimed and before anything else is done to it: what it raises ends the opening.

        Raises TopicNotFound if there is none and `create` is off, NotReady if others take it over all the time.
        """
        record = await self._claim(log_key(name), create, dict(properties or {}))
        if confirm is not None:
            await confirm()
        await self._recover(record)
        opened = ManagedLedger(
            name,
            record,
            runtime=self._runtime,
            metadata=self._metadata,
            resolver=self._resolver,
            config=self._config,
            cache=self._cache,
            listener=listener,
            limits=limits,
            policy=policy,
            readable=readable,
            trim_guard=trim_guard,
        )
        await self._load_cursors(opened, record.key)
        opened.loaded()
        return opened

    async def create(self, name: str, properties: Mapping[str, str] | None = None) -> bool:
        """Make an empty log without opening it: its record, which nobody owns yet. False if there is one; it is left alone."""
        key = log_key(name)
        for _attempt in range(CLAIM_ATTEMPTS):
            found = await self._metadata.get(key, fresh=True)
            if found is not None:
                record = decode_record(LogRecord, key, found.value)
                if not record.is_deleted:
                    return False
                await finish_removal(self._metadata, self._resolver, key, record, found.version)
                continue
            value = LogRecord(
                incarnation=self._runtime.token(128),
                owner_token=self._runtime.token(128),
                properties=dict(properties or {}),
                created_ms=self._runtime.clock.now_ms(),
            )
            try:
                await swap(self._metadata, key, encode_record(value), ABSENT)
            except VersionConflict:
                continue
            return True
        raise NotReady(f"The log {key} is being created and deleted by others all the time; try again.")

    async def exists(self, name: str, *, fresh: bool = False) -> bool:
        """Whether there is a log of this name."""
        return await self._properties(name, fresh=fresh) is not None

    async def properties(self, name: str) -> Mapping[str, str] | None:
        """The properties of a log, read fresh; None if there is none of this name."""
        return await self._properties(name, fresh=True)

    async def incarnation(self, name: str) -> str | None:
        """Which log has this name now, read fresh; None if none has."""
        record = await self._existing(name, fresh=True)
        return None if record is None else record.incarnation

    async def _properties(self, name: str, *, fresh: bool) -> Mapping[str, str] | None:
        record = await self._existing(name, fresh=fresh)
        return None if record is None else record.properties

    async def _existing(self, name: str, *, fresh: bool) -> LogRecord | None:
        key = log_key(name)
        found = await self._metadata.get(key, fresh=fresh)
        record = None if found is None else decode_record(LogRecord, key, found.value)
        return None if record is None or record.is_deleted else record

    async def names(self, parent: str) -> AsyncIterator[str]:
        """Last name components of the logs directly below `parent`, as stored (encoded), in order. One whose record cannot be
        read is there too: nobody says that it is deleted."""
        async for record in self._metadata.scan(Span(f"{ROOT}/{parent}")):
            try:
                is_deleted = decode_record(LogRecord, record.key, record.value).is_deleted
            except StoreMismatch:  # whoever uses it is told
                is_deleted = False
            if not is_deleted:
                yield record.name

    async def delete(self, name: str, properties: Mapping[str, str] | None = None, *, owner_token: str | None = None) -> None:
        """Remove a log that is not loaded here: cursors, ledgers, record; given `properties`, only one that has these, given an
        `owner_token`, only while that owner has it. Raises TopicNotFound, LedgerFenced."""
        await remove_log(self._metadata, self._resolver, log_key(name), properties, owner_token=owner_token)

    async def _claim(self, key: str, create: bool, properties: dict[str, str]) -> OwnedRecord[LogRecord]:
        """Make the record ours: the first step of opening."""
        metadata = self._metadata
        for _attempt in range(CLAIM_ATTEMPTS):
            found = await metadata.get(key, fresh=True)
            record = None if found is None else decode_record(LogRecord, key, found.value)
            if found is not None and record is not None and record.is_deleted:
                await finish_removal(metadata, self._resolver, key, record, found.version)
                continue
            if record is None:
                if not create:
                    raise TopicNotFound(f"The log {key} does not exist.")
                record = LogRecord(
                    incarnation=self._runtime.token(128), properties=properties, created_ms=self._runtime.clock.now_ms()
                )
            value = msgspec.structs.replace(record, owner_epoch=record.owner_epoch + 1, owner_token=self._runtime.token(128))
            try:
                version = await swap(metadata, key, encode_record(value), ABSENT if found is None else found.version)
            except VersionConflict:
                continue
            if self._on_claim is not None:
                self._on_claim(key, [info.ledger_id for info in value.ledgers])
            return OwnedRecord(metadata, key, value, version)
        raise NotReady(f"The log {key} is being taken over by others all the time; try again.")

    async def _recover(self, record: OwnedRecord[LogRecord]) -> None:
        """Fence the ledger that may still be written and write down what it holds; an empty one leaves the list."""
        key, value = record.key, record.value
        ledgers = list(value.ledgers)
        dropped: list[LedgerInfo] = []
        gone: list[LedgerInfo] = []
        while ledgers and (ledgers[-1].timestamp == 0 or ledgers[-1].entries == 0):
            info = ledgers.pop()
            store = self._resolver.for_ledger(info.ledger_id, info.properties)
            try:
                end = await settled(store, info.ledger_id)
            except LedgerNotFound:
                gone.append(info)
                continue
            if end.entries:
                ledgers.append(
                    msgspec.structs.replace(
                        info,
                        entries=end.entries,
                        size=end.size,
                        timestamp=self._runtime.clock.now_ms(),
                        last_index=end.last_index,
                        last_append_ms=end.last_append_ms,
                    )
                )
                break
            dropped.append(info)
        gone += await missing(self._resolver, [info for info in ledgers if info in value.ledgers])
        if gone:
            self._give_up(key, value.ledgers, gone)
            ledgers = [info for info in ledgers if info not in gone]
        last_index, last_append_ms = value.last_index, value.last_append_ms
        if ledgers:  # what is stored counts, never less than what an earlier update wrote down
            last_index = max(last_index, ledgers[-1].last_index)
            last_append_ms = max(last_append_ms, ledgers[-1].last_append_ms)
        listed = tuple(ledgers)
        if (listed, last_index, last_append_ms) == (value.ledgers, value.last_index, value.last_append_ms):
            return
        await record.update(
            lambda old: msgspec.structs.replace(
                old,
                ledgers=listed,
                last_ledger_id=max(old.last_ledger_id, old.ledgers[-1].ledger_id if old.ledgers else -1),
                last_index=last_index,
                last_append_ms=last_append_ms,
            )
        )
        for info in dropped:
            try:
                await self._resolver.for_ledger(info.ledger_id, info.properties).delete(info.ledger_id)
            except BraidError as error:
                log.warning("empty ledger %d of %s cannot be deleted before the next start: %s", info.ledger_id, key, error)

    def _give_up(self, key: str, listed: Sequence[LedgerInfo], gone: Sequence[LedgerInfo]) -> None:
        """Refuse a log of which ledgers are missing, unless that is wanted otherwise (INV16)."""
        gone = sorted(gone, key=lambda info: info.ledger_id)
        what = f"the topic {topic_of(key.removeprefix(f'{ROOT}/'))}"
        ids = [info.ledger_id for info in gone]
        store = self._resolver.for_ledger(ids[0], gone[0].properties)
        if not self._config.skip_lost_ledgers:
            raise lost(what, ids, store)
        given_up(what, ids, store, content_of(listed, gone))

    async def _load_cursors(self, opened: ManagedLedger, key: str) -> None:
        """Claim every cursor of this log; records of an earlier log of the same name (INV5) are swept."""
        async for found in self._metadata.scan(Span(key), fresh=True):
            name = decode_name(found.name)
            try:
                loaded = await CursorStore.load(opened, name, found)
            except StoreMismatch as error:  # costs this cursor, and nobody else's messages
                opened.unreadable.pass_over(name, opened.name, error)
                continue
            if loaded is None:
                log.warning("the record %s belongs to a deleted log and is removed", found.key)
                try:
                    await self._metadata.delete(found.key, expected=found.version)
                except VersionConflict:
                    log.info("the record %s changed meanwhile and is left to the next open", found.key)
                continue
            store, position = loaded
            if self._on_claim is not None:
                self._on_claim(found.key, [store.ledger_id])
            try:
                opened.restore_cursor(ManagedCursor.restored(opened, name, store, position))
            except (ValueError, LookupError) as error:
                opened.unreadable.pass_over(name, opened.name, unreadable(found.key, error))
