"""Deleting a log: a plan that any broker can begin and any other can finish.

The record is claimed and marked first, so that it stops every owner (INV2) and is gone for everybody; then cursors, then
ledgers, last the record. Each step may be repeated. A crash leaves a marked record, which the next open or delete finishes.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

import msgspec

from braid.errors import BraidError, LedgerFenced, NotReady, StoreMismatch, TopicNotFound, VersionConflict
from braid.managedledger.api import LedgerResolver
from braid.managedledger.owned_record import swap
from braid.managedledger.records import CursorRecord, LogRecord, decode_record, encode_record
from braid.metadata.api import MetadataStore, Record, Span

log = logging.getLogger(__name__)
ATTEMPTS = 10


async def remove_log(
    metadata: MetadataStore,
    resolver: LedgerResolver,
    key: str,
    properties: Mapping[str, str] | None = None,
    *,
    owner_token: str | None = None,
) -> None:
    """Remove the log at `key` whoever owns it; given `properties`, only one that has these, so that a call that comes late does
    not remove the log that followed; given an `owner_token`, only while that is its owner's (LedgerFenced). A removal that was
    begun is finished in any case. Raises TopicNotFound if there is none.
    """
    for _attempt in range(ATTEMPTS):
        found = await metadata.get(key, fresh=True)
        if found is None:
            raise TopicNotFound(f"The log {key} does not exist.")
        record = decode_record(LogRecord, key, found.value)
        if record.is_deleted:  # with the mark that is there: another one would make whoever finishes it leave that to us
            await finish_removal(metadata, resolver, key, record, found.version)
            return
        if properties is not None and not properties.items() <= record.properties.items():
            raise TopicNotFound(f"The log {key} that was to be removed is gone; another one has its name.")
        if owner_token is not None and record.owner_token != owner_token:
            raise LedgerFenced(f"The log {key} was taken over by another owner and is not removed.")
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
    """The steps after the mark, from the record alone. Several may do them at the same time; once one has finished, there may
    be a new log of this name, whose cursors the others must not touch."""
    async for found in metadata.scan(Span(key), fresh=True):
        if not await _remove_cursor(metadata, resolver, key, version, found):
            return
    for info in record.ledgers:
        await _delete_ledger(resolver, key, info.ledger_id, info.properties)
    try:
        await metadata.delete(key, expected=version)
    except VersionConflict:
        _left_to_others(key)


async def _remove_cursor(metadata: MetadataStore, resolver: LedgerResolver, key: str, version: int, found: Record) -> bool:
    """Remove a cursor's ledger and record; False if the log's record is no longer the one with our mark."""
    current: Record | None = found
    for _attempt in range(ATTEMPTS):
        marked = await metadata.get(key, fresh=True)
        if marked is None or marked.version != version:
            _left_to_others(key)
            return False
        if current is None:
            return True
        # `current` was read before the mark was seen in its place, so it is no cursor of a new log.
        try:
            cursor = decode_record(CursorRecord, current.key, current.value)
        except StoreMismatch as error:
            log.warning("%s It is removed with its log; its ledger, if it has one, is deleted after the next start.", error)
        else:
            if cursor.cursors_ledger_id >= 0:
                await _delete_ledger(resolver, key, cursor.cursors_ledger_id, cursor.ledger_properties)
        try:
            await metadata.delete(current.key, expected=current.version)
        except VersionConflict:  # the log's former owner wrote it once more, or somebody else removed it
            current = await metadata.get(current.key, fresh=True)
        else:
            return True
    raise NotReady(f"The record {found.key} is being changed by others all the time; delete the log again.")


def _left_to_others(key: str) -> None:
    log.info("the record %s was changed or removed by somebody else, who finishes the removal of the log", key)


async def _delete_ledger(resolver: LedgerResolver, key: str, ledger_id: int, properties: Mapping[str, str]) -> None:
    """The removal goes on without a ledger that cannot be deleted now: the log is gone for its users in any case."""
    try:
        await resolver.for_ledger(ledger_id, properties).delete(ledger_id)
    except BraidError as error:
        log.warning(
            "the log %s is removed, but its ledger %d could not be deleted and takes up space until the orphan sweep after the "
            "next start deletes it (managed_ledger.orphan_sweep_minutes): %s",
            key,
            ledger_id,
            error,
        )
