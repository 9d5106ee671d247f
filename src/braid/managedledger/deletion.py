"""Deleting a log: a plan that any broker can begin and any other can finish.

The record is claimed and marked first, so that it stops every owner (INV2) and is gone for everybody; then cursors, then
ledgers, last the record. Each step may be repeated. A crash leaves a marked record, which the next open or delete finishes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from braid.errors import BraidError, NotReady, StoreMismatch, TopicNotFound, VersionConflict
from braid.managedledger.api import LedgerResolver
from braid.managedledger.owned_record import swap
from braid.managedledger.records import CursorRecord, LogRecord, decode_record, encode_record
from braid.metadata.api import MetadataStore, Span

log = logging.getLogger(__name__)
ATTEMPTS = 10


async def remove_log(metadata: MetadataStore, resolver: LedgerResolver, key: str) -> None:
    """Remove the log at `key` whoever owns it. Raises TopicNotFound if there is none."""
    for _attempt in range(ATTEMPTS):
        found = await metadata.get(key, fresh=True)
        if found is None:
            raise TopicNotFound(f"The log {key} does not exist.")
        record = decode_record(LogRecord, key, found.value)
        marked = msgspec.structs.replace(
            record, owner_epoch=record.owner_epoch + 1, owner_token=f"delete-{found.version}", is_deleted=True
        )
        try:
            version = await swap(metadata, key, encode_record(marked), found.version)
        except VersionConflict:
            continue
        await finish_removal(metadata, resolver, key, marked, version)
        return
    raise NotReady(f"The log {key} is being changed by others all the time; try again.")


async def finish_removal(metadata: MetadataStore, resolver: LedgerResolver, key: str, record: LogRecord, version: int) -> None:
    """The steps after the mark, from the record alone."""
    async for found in metadata.scan(Span(key), fresh=True):
        try:
            cursor = decode_record(CursorRecord, found.key, found.value)
        except StoreMismatch as error:
            log.warning("an unreadable record goes with the log: %s", error)
        else:
            if cursor.cursors_ledger_id >= 0:
                await _delete_ledger(resolver, cursor.cursors_ledger_id, cursor.ledger_properties)
        await metadata.delete(found.key)
    for info in record.ledgers:
        await _delete_ledger(resolver, info.ledger_id, info.properties)
    try:
        await metadata.delete(key, expected=version)
    except VersionConflict:
        log.info("the log %s was removed by somebody else at the same time", key)


async def _delete_ledger(resolver: LedgerResolver, ledger_id: int, properties: Mapping[str, str]) -> None:
    try:
        await resolver.for_ledger(ledger_id, properties).delete(ledger_id)
    except BraidError as error:
        log.warning("ledger %d could not be deleted and is an orphan now: %s", ledger_id, error)
