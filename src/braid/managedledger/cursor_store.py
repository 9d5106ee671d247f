"""`CursorStore`: where one durable cursor's position survives: its record and its ledger.

Owns both and the order in which they change: the first entry of a new ledger is durable before the CAS that points to it, and
only then is the old ledger deleted. Only the last entry of a ledger counts; if it has none, the snapshot in the record does. A
ledger that is missing is an error (INV16): the snapshot may be old. Upholds INV2 for cursors: loading one claims its record by
CAS, then fences its ledger, then reads.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from braid.errors import (
    BraidError,
    EntryNotFound,
    LedgerError,
    LedgerFenced,
    LedgerNotFound,
    LedgerStoreReadOnly,
    NotReady,
    OutcomeUnknown,
    VersionConflict,
)
from braid.ledger.api import LedgerWriter
from braid.managedledger.labels import ledger_labels
from braid.managedledger.lost import given_up, lost
from braid.managedledger.owned_record import FencedInDoubt, OwnedRecord, swap
from braid.managedledger.records import (
    CursorPosition,
    CursorRecord,
    PositionRecord,
    changed,
    decode_position,
    decode_record,
    encode_position,
    encode_record,
    log_key,
)
from braid.managedledger.topic_names import topic_of
from braid.metadata.api import ABSENT, Record
from braid.metadata.names import encode_name
from braid.model.positions import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from braid.managedledger.log import ManagedLedger

log = logging.getLogger(__name__)
CLAIM_ATTEMPTS = 10
SHOWN_BYTES = 200
"""Of a record that is removed unread, in the log."""


class CursorStore:
    """The stored half of a durable cursor. Calls of `save` come one after the other."""

    def __init__(self, owner: ManagedLedger, name: str, record: OwnedRecord[CursorRecord]) -> None:
        self.name = name
        self.ledger_switched_ms = 0
        self._owner = owner
        self._record = record
        self._writer: LedgerWriter | None = None

    @classmethod
    async def create(cls, owner: ManagedLedger, name: str, mark_delete: Position, properties: dict[str, str]) -> CursorStore:
        """A new cursor. A record of this name that is no cursor of this log and owner is replaced."""
        key = f"{log_key(owner.name)}/{encode_name(name)}"
        value = CursorRecord(
            incarnation=owner.incarnation,
            owner_epoch=owner.owner_epoch,
            owner_token=owner.owner_token,
            position=CursorPosition(mark_delete=PositionRecord(*mark_delete)),
            properties=properties,
        )
        expected = ABSENT
        for _attempt in range(CLAIM_ATTEMPTS):
            try:
                version = await swap(owner.metadata, key, encode_record(value), expected)
            except VersionConflict:
                found = await owner.metadata.get(key, fresh=True)
                # A later owner's cursor must not be replaced: it claimed the log before it wrote what was just read (INV2).
                await owner.check_owner()
                expected = ABSENT if found is None else found.version
                continue
            # A broker that lost the log meanwhile could still create records: look who owns it now (INV2).
            try:
                await owner.check_owner()
            except LedgerFenced:
                await _take_back(owner, key, version)
                raise
            return cls(owner, name, OwnedRecord(owner.metadata, key, value, version))
        raise NotReady(f"The cursor {name} of log {owner.name} is being changed by somebody else; try again.")

    @classmethod
    async def load(cls, owner: ManagedLedger, name: str, found: Record) -> tuple[CursorStore, CursorPosition] | None:
        """Take over a stored cursor; None if it is gone or belongs to an earlier log of the same name."""
        current: Record | None = found
        for _attempt in range(CLAIM_ATTEMPTS):
            if current is None:
                return None
            value = decode_record(CursorRecord, current.key, current.value)
            if value.incarnation != owner.incarnation:
                return None
            value = msgspec.structs.replace(value, owner_epoch=owner.owner_epoch, owner_token=owner.owner_token)
            try:
                version = await swap(owner.metadata, current.key, encode_record(value), current.version)
            except VersionConflict:
                current = await owner.metadata.get(current.key, fresh=True)
                continue
            store = cls(owner, name, OwnedRecord(owner.metadata, current.key, value, version))
            return store, await store._position()
        raise NotReady(f"The cursor {name} of log {owner.name} is being changed by somebody else; try again.")

    @classmethod
    async def remove_unread(cls, owner: ManagedLedger, name: str) -> None:
        """Delete the record of a cursor that cannot be read. Its ledger, if it has one, is left to the sweep of orphans."""
        key = f"{log_key(owner.name)}/{encode_name(name)}"
        for _attempt in range(CLAIM_ATTEMPTS):
            found = await owner.metadata.get(key, fresh=True)
            await owner.check_owner()
            if found is None:
                return
            log.warning("%s is removed although it cannot be read: %r", key, found.value[:SHOWN_BYTES])
            try:
                await owner.metadata.delete(key, expected=found.version)
            except VersionConflict:
                continue
            return
        raise NotReady(f"The cursor {name} of log {owner.name} is being changed by somebody else; try again.")

    @property
    def properties(self) -> Mapping[str, str]:
        """What users set."""
        return self._record.value.properties

    @property
    def ledger_id(self) -> int:
        """The ledger the position is in, -1 if it is in the record."""
        return self._record.value.cursors_ledger_id

    @property
    def ledger_last_entry(self) -> int:
        return -1 if self._writer is None else self._writer.last_confirmed

    async def set_properties(self, changes: Mapping[str, str | None]) -> None:
        """Change the user's properties, durably."""
        await self._record.update(
            lambda record: msgspec.structs.replace(record, properties=changed(record.properties, changes))
        )

    async def save(self, position: CursorPosition) -> None:
        """Make `position` durable."""
        writer = self._writer
        if writer is not None and writer.last_pushed + 1 < self._owner.config.max_entries_per_cursor_ledger:
            try:
                await writer.add(encode_position(position))
            except LedgerFenced:
                raise
            except LedgerError as error:
                if not isinstance(error, LedgerStoreReadOnly):  # of a full disk its store tells, once for all cursors
                    log.warning("cursor %s of log %s leaves its ledger: %s", self.name, self._owner.name, error)
                self._writer = None
            else:
                return
        await self._save_elsewhere(position)

    async def close(self, position: CursorPosition, *, is_dirty: bool) -> None:
        """A clean end: a small position goes into the record, so that the next open reads no ledger."""
        if self._fits_record(position):
            if is_dirty or self.ledger_id >= 0:
                await self._point_to(position, -1)
        elif is_dirty:
            await self.save(position)
        if self._writer is not None:
            await self._writer.close()
            self._writer = None

    async def delete(self) -> None:
        """Remove record and ledger."""
        record = self._record
        try:
            await self._owner.metadata.delete(record.key, expected=record.version)
        except VersionConflict:
            raise record.lost() from None
        except OutcomeUnknown:
            if await self._owner.metadata.get(record.key, fresh=True) is not None:
                raise
        if self.ledger_id >= 0:
            await self._owner.ledgers.discard(self.ledger_id, record.value.ledger_properties)

    async def _save_elsewhere(self, position: CursorPosition) -> None:
        """Begin a new ledger; if that cannot be, a small position goes into the record."""
        owner = self._owner
        try:
            writer = await owner.resolver.active().create(
                custom=ledger_labels("cursor", f"{owner.name}/{encode_name(self.name)}", owner.incarnation)
            )
            await writer.add(encode_position(position))
        except LedgerFenced:
            raise
        except LedgerError:
            if not self._fits_record(position):
                raise
            await self._point_to(position, -1)
            return
        try:
            await self._point_to(position, writer.ledger_id)
        except (OutcomeUnknown, FencedInDoubt):
            raise  # the record may name it
        except BraidError:
            await self._owner.ledgers.discard(writer.ledger_id, {})
            raise
        self._writer = writer
        self.ledger_switched_ms = owner.runtime.clock.now_ms()

    async def _point_to(self, position: CursorPosition, ledger_id: int) -> None:
        """One CAS says where the position is from now on; then the old ledger goes."""
        old = self._record.value
        snapshot = position if self._fits_record(position) else None

        def pointed(record: CursorRecord) -> CursorRecord:
            return msgspec.structs.replace(
                record, cursors_ledger_id=ledger_id, ledger_properties={}, position=snapshot or record.position
            )

        await self._record.update(pointed)
        if ledger_id != old.cursors_ledger_id:
            self._writer = None
            if old.cursors_ledger_id >= 0:
                await self._owner.ledgers.discard(old.cursors_ledger_id, old.ledger_properties)

    def _fits_record(self, position: CursorPosition) -> bool:
        limit = self._owner.config.max_ranges_in_record
        return len(position.ranges) <= limit and len(position.masks) <= limit and len(position.properties) <= limit

    async def _position(self) -> CursorPosition:
        """The stored position, after stopping whoever still writes it."""
        record = self._record.value
        ledger_id = record.cursors_ledger_id
        if ledger_id < 0:
            return record.position
        store = self._owner.resolver.for_ledger(ledger_id, record.ledger_properties)
        try:
            reader = await store.open(ledger_id, fence=True)
            try:
                last = reader.last_confirmed
                if last >= 0:
                    return decode_position(ledger_id, (await reader.read(last, last))[0])
            finally:
                await reader.close()
        except (LedgerNotFound, EntryNotFound):
            what = f"the subscription {self.name} of {topic_of(self._owner.name)}"
            if not self._owner.config.skip_lost_ledgers:
                raise lost(what, [ledger_id], store) from None
            place = record.position.mark_delete
            given_up(what, [ledger_id], store, f"it goes on behind {place.ledger_id}:{place.entry_id}, where its record has it")
        return record.position


async def _take_back(owner: ManagedLedger, key: str, version: int) -> None:
    """Remove a record that we had no right to create, unless the log's new owner has made it its own."""
    try:
        await owner.metadata.delete(key, expected=version)
    except BraidError as error:
        log.info("the record %s is left to the new owner of the log: %s", key, error)
