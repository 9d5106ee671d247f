"""`OwnedRecord`: a metadata record that one owner updates by compare-and-swap.

Owns the rule of INV2 for records: every update names the version of the last one; a conflict means that somebody else took
over, and from then on every update is refused. An unknown outcome is settled by reading the record back: the
owner's token inside the value tells our write from another's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic

from braid.errors import LedgerFenced, OutcomeUnknown, StoreError, VersionConflict
from braid.managedledger.records import R, decode_record, encode_record
from braid.metadata.api import ABSENT, MetadataStore, Record

SETTLE_ATTEMPTS = 3


class ConflictInDoubt(VersionConflict):
    """Somebody else's value is there, and ours may have been there before: theirs may have been made from it."""


class FencedInDoubt(LedgerFenced):
    """The record was taken over, and our last update may have been applied before: its new owner may know of it."""


async def swap(store: MetadataStore, key: str, value: bytes, expected: int) -> int:
    """One compare-and-swap with a settled outcome; returns the new version. `value` must name its writer. Raises
    VersionConflict and StoreUnavailable if it was certainly not applied. If it may have been, ConflictInDoubt (somebody else's
    value is there now) or OutcomeUnknown (reading back did not settle it): what `value` names must be kept then."""
    is_in_doubt = False
    for _attempt in range(SETTLE_ATTEMPTS):
        try:
            return (await store.put(key, value, expected=expected)).version
        except VersionConflict:
            if not is_in_doubt:
                raise
            # An earlier attempt may have been applied after all, after it was looked for.
            found = await _read_back(store, key)
            if found is not None and found.value == value:
                return found.version
            raise _taken(key) from None
        except OutcomeUnknown:
            is_in_doubt = True
            found = await _read_back(store, key)
            if found is not None and found.value == value:
                return found.version
            if (ABSENT if found is None else found.version) != expected:
                raise _taken(key) from None
        except StoreError as error:
            if not is_in_doubt:
                raise
            raise _unsettled(key) from error
    raise _unsettled(key)


async def _read_back(store: MetadataStore, key: str) -> Record | None:
    try:
        return await store.get(key, fresh=True)
    except StoreError as error:
        raise _unsettled(key) from error


def _taken(key: str) -> ConflictInDoubt:
    return ConflictInDoubt(f"The record {key} was changed by somebody else.")


def _unsettled(key: str) -> OutcomeUnknown:
    return OutcomeUnknown(f"Whether the update of {key} was applied is not known.")


class OwnedRecord(Generic[R]):
    """The record as its owner knows it. Updates run one after the other."""

    __slots__ = ("_in_doubt", "_lock", "_store", "is_lost", "key", "value", "version")

    def __init__(self, store: MetadataStore, key: str, value: R, version: int) -> None:
        self._store = store
        self._lock = asyncio.Lock()
        self._in_doubt = False
        self.key = key
        self.value: R = value
        self.version = version
        self.is_lost = False

    async def update(self, change: Callable[[R], R]) -> R:
        """Write `change(current)`. Raises LedgerFenced for good once the record is no longer ours."""
        async with self._lock:
            if self.is_lost:
                raise self.lost()
            if self._in_doubt:
                await self._settle()
            value = change(self.value)
            try:
                self.version = await swap(self._store, self.key, encode_record(value), self.version)
            except ConflictInDoubt:
                self.is_lost = True
                raise FencedInDoubt(*self.lost().args) from None
            except VersionConflict:
                self.is_lost = True
                raise self.lost() from None
            except (OutcomeUnknown, asyncio.CancelledError):
                self._in_doubt = True
                raise
            self.value = value
            return value

    async def _settle(self) -> None:
        """An earlier update ended without a verdict: adopt the stored version if its writer was us."""
        found = await self._store.get(self.key, fresh=True)
        if found is None:
            self.is_lost = True
            raise self.lost()
        if found.version != self.version:
            stored = decode_record(type(self.value), self.key, found.value)
            if stored.owner_token != self.value.owner_token:
                self.is_lost = True
                raise self.lost()
            self.version = found.version
        self._in_doubt = False

    def lost(self) -> LedgerFenced:
        """The error of an owner that is none any more."""
        return LedgerFenced(f"The record {self.key} was taken over by another owner; open the log again.")
