"""`OrphanSweep`: removes ledgers that an earlier process left behind and that no record names.

A ledger is created before a record names it, and deleted after the record no longer does; a process that ends in between leaves
an orphan, which nobody reads and nobody deletes. The sweep finds them by their labels, once after a start. It must be given a
ledger store that no other process uses, and a metadata store that is not older than the ledgers (the standalone broker makes
sure of both before it serves).

Why it never removes a ledger that is needed:

1. Only ledgers are looked at that were there in `begin`, before anything was served. Whoever created them is dead. A ledger
   that is being created now is never looked at, however long its creation takes.
2. In this process an id comes into a record in two ways only: by the call that created the ledger (not these, by 1), or carried
   over from what the record named when its owner claimed it (INV2: claim, load, serve; INV3: ids are never used twice). So an
   id that the record did not name at the claim cannot come back: neither this owner nor a later one has ever seen it, and an
   earlier owner's update fails because the claim changed the version (claim before act, INV4).
3. What counts is therefore the record at its first claim in this process, told by `claimed`; or, if there was none yet, a
   fresh read, to which the claim to come cannot add. A record read after the claim would prove nothing: an owner whose update
   ended without a verdict may hold in memory, and write again, what the stored record does not name at the moment.
   A schema's locator has no owner; each update of it starts with a fresh read, which is the same thing.
4. Before a ledger is deleted, `minutes` later, its record is read afresh once more. By the above it cannot name the ledger;
   if it does, the argument is broken somewhere, so the ledger is kept and an error is logged.

When in doubt (labels that are missing or unknown, a record that cannot be read) a ledger stays. Orphans of this process's own
life wait for the next start. The argument needs that only the record a label names can name the ledger: whoever lets another
record point to an existing ledger must teach it to this module first.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from braid.errors import BraidError, LedgerNotFound
from braid.ledger.api import LedgerStore
from braid.managedledger.labels import labelled_for
from braid.managedledger.records import CursorRecord, LogRecord, decode_record, log_key
from braid.managedledger.schemas import decode_locator, locator_key
from braid.metadata.api import MetadataStore
from braid.runtime.clock import Clock

log = logging.getLogger(__name__)
CHUNK = 100
"""Ledgers or records looked at before other work gets its turn."""
PAUSE_SECONDS = 0.02
MAX_IDS_LOGGED = 20


class OrphanSweep:
    """See the module. `begin` once before serving, `run` in the background, `claimed` from every claim in between."""

    def __init__(self, clock: Clock, metadata: MetadataStore, store: LedgerStore, minutes: int) -> None:
        self._clock = clock
        self._metadata = metadata
        self._store = store
        self._wait_seconds = minutes * 60
        self._inherited: list[int] = []
        self._claims: dict[str, frozenset[int]] | None = {}
        """Record key to the ledgers it named at its first claim in this process; None once every ledger has been judged."""

    async def begin(self) -> bool:
        """Note the ledgers that are there already; False if there is none and so nothing to do."""
        self._inherited = [ledger_id async for ledger_id in self._store.ledgers()]
        if not self._inherited:
            self._claims = None
        return bool(self._inherited)

    def claimed(self, key: str, ledgers: Collection[int]) -> None:
        """The record at `key` was claimed and names these ledgers; to be called before its owner can change it."""
        if self._claims is not None:
            self._claims.setdefault(key, frozenset(ledgers))

    async def run(self) -> None:
        """Wait, look, wait, remove; what could not be removed is tried again after the same time."""
        await self._clock.sleep(self._wait_seconds)
        orphans = await self._look()
        while orphans:
            await self._clock.sleep(self._wait_seconds)
            orphans = await self._remove(orphans)

    async def _look(self) -> dict[tuple[str, str], list[int]]:
        """The orphans among the inherited ledgers, by component and record key."""
        labelled: dict[tuple[str, str], list[int]] = {}
        for count, ledger_id in enumerate(self._inherited):
            await self._breathe(count)
            try:
                custom = (await self._store.metadata(ledger_id)).custom
            except LedgerNotFound:
                continue  # deleted since
            if (owner := _owner(custom)) is not None:
                labelled.setdefault(owner, []).append(ledger_id)
        self._inherited = []
        orphans: dict[tuple[str, str], list[int]] = {}
        for count, ((component, key), ids) in enumerate(labelled.items()):
            await self._breathe(count)
            try:
                named: Collection[int] = await self._named(component, key)
            except BraidError as error:
                log.warning("ledgers %s may be orphans, but the record that tells cannot be read: %s", _shown(ids), error)
                continue
            if self._claims is not None and (at_claim := self._claims.get(key)) is not None:
                named = at_claim
            if lost := [ledger_id for ledger_id in ids if ledger_id not in named]:
                orphans[component, key] = lost
        self._claims = None
        return orphans

    async def _remove(self, orphans: Mapping[tuple[str, str], list[int]]) -> dict[tuple[str, str], list[int]]:
        """Delete them; returns those that are still to be deleted."""
        left: dict[tuple[str, str], list[int]] = {}
        for count, ((component, key), ids) in enumerate(orphans.items()):
            await self._breathe(count)
            removed: list[int] = []
            pending = list(ids)
            try:
                named = await self._named(component, key)
                while pending:
                    ledger_id = pending[0]
                    if ledger_id in named:
                        log.error("ledger %d was taken for an orphan, but %s names it; it is kept", ledger_id, key)
                    else:
                        await self._store.delete(ledger_id)
                        removed.append(ledger_id)
                    del pending[0]
            except BraidError as error:
                log.warning("ledgers %s of %s, named by no record, cannot be deleted yet: %s", _shown(pending), key, error)
                left[component, key] = pending
            if removed:
                log.info(
                    "removed ledgers %s, which an earlier process left behind: %s does not name them", _shown(removed), key
                )
        return left

    async def _named(self, component: str, key: str) -> set[int]:
        """The ledgers that the record names now. Raises if it cannot be read or understood."""
        found = await self._metadata.get(key, fresh=True)
        if found is None:
            return set()
        if component == "schema":
            return {index.position.ledger_id for index in decode_locator(key, found.value).versions}
        if component == "cursor":
            return {decode_record(CursorRecord, key, found.value).cursors_ledger_id}
        return {info.ledger_id for info in decode_record(LogRecord, key, found.value).ledgers}

    async def _breathe(self, count: int) -> None:
        if count % CHUNK == CHUNK - 1:
            await self._clock.sleep(PAUSE_SECONDS)


def _owner(custom: Mapping[str, bytes]) -> tuple[str, str] | None:
    """Component and record key of what a ledger was made for; None if the labels do not tell."""
    if (labels := labelled_for(custom)) is None:
        return None
    component, name = labels
    if component in ("managed-ledger", "cursor"):
        return component, log_key(name)
    return (component, locator_key(name)) if component == "schema" else None


def _shown(ids: list[int]) -> str:
    text = ", ".join(map(str, ids[:MAX_IDS_LOGGED]))
    return text if len(ids) <= MAX_IDS_LOGGED else f"{text} and {len(ids) - MAX_IDS_LOGGED} more"
