"""`LedgerList`: the ledgers of a loaded log, in memory and in its record.

Owns the list, its map of entries, the order in which both change (the record first, by one CAS, then the memory) and the
deletion of ledgers that no record names any more. Upholds INV2: a conflict on the record is reported as the end of this log.
Must not know entries on their way, queues or cursors: when a ledger is created, left or trimmed is the log's decision.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import msgspec

from braid.errors import BraidError, InvariantBroken, LedgerFenced, LedgerStoreReadOnly
from braid.managedledger.api import LedgerResolver
from braid.managedledger.ledger_map import LedgerMap
from braid.managedledger.owned_record import OwnedRecord
from braid.managedledger.records import LedgerInfo, LogRecord, PositionRecord
from braid.model.positions import Position

log = logging.getLogger(__name__)
MAX_UNDELETED = 10_000


class LedgerList:
    """See the module."""

    __slots__ = ("_confirmed", "_fenced", "_log", "_record", "_resolver", "_undeleted", "has_news", "infos", "map")

    def __init__(
        self,
        log_name: str,
        record: OwnedRecord[LogRecord],
        resolver: LedgerResolver,
        *,
        confirmed: Callable[[], tuple[int, int]],
        fenced: Callable[[LedgerFenced], None],
    ) -> None:
        """`confirmed` tells the index and the append time of the last durable entry; `fenced` hears that the record belongs to
        another owner."""
        self._log = log_name
        self._record = record
        self._resolver = resolver
        self._confirmed = confirmed
        self._fenced = fenced
        self.infos: list[LedgerInfo] = list(record.value.ledgers)
        """In order; entries and size of the last one are final only once it is closed."""
        self.map = LedgerMap()
        for info in self.infos:
            self.map.append(info.ledger_id, info.entries)
        self.has_news = False
        """The list in memory is ahead of the record."""
        self._undeleted: dict[int, Mapping[str, str]] = {}
        """Ledgers that no record names and whose deletion failed, with their properties; the next trim tries again."""

    @property
    def highest(self) -> int:
        """The highest id this log ever had, -1 if none; that of the next ledger must lie above (INV3)."""
        return max(self._record.value.last_ledger_id, self.infos[-1].ledger_id if self.infos else -1)

    def ended(self, ledger_id: int, entries: int, size: int, now_ms: int) -> None:
        """The last ledger is closed with this content; the record hears of it with the next `commit`."""
        info = self.infos[-1]
        if info.ledger_id != ledger_id:
            raise InvariantBroken(f"INV3: ledger {ledger_id} ended while {info.ledger_id} is the last of log {self._log}")
        last_index, last_append_ms = self._confirmed()
        self.infos[-1] = msgspec.structs.replace(
            info, entries=entries, size=size, timestamp=now_ms, last_index=last_index, last_append_ms=last_append_ms
        )
        self.has_news = True

    async def commit(
        self,
        change: Callable[[list[LedgerInfo]], list[LedgerInfo]],
        *,
        last_shown: Position | None = None,
        trimmed_index: int = -1,
    ) -> list[LedgerInfo]:
        """Change the list of ledgers, in the record and then here; returns the ledgers that are no longer listed.

        `change` takes away or adds whole ledgers; it is applied twice, because a ledger may be closed while the record is
        written. Of what it takes away at the front, `last_shown` is the last entry that a reader can have got
        and `trimmed_index` the index of the last message.
        """
        written: list[LedgerInfo] = []

        def listed(record: LogRecord) -> LogRecord:
            written[:] = change(self.infos)
            last_index, last_append_ms = self._confirmed()
            return msgspec.structs.replace(
                record,
                ledgers=tuple(written),
                last_ledger_id=max(record.last_ledger_id, written[-1].ledger_id if written else -1),
                last_index=last_index,
                last_append_ms=last_append_ms,
                trimmed_position=_trimmed_position(record, last_shown),
                trimmed_index=max(record.trimmed_index, trimmed_index),
            )

        await self.update(listed)
        before, self.infos = self.infos, change(self.infos)
        self.has_news = self.infos != written
        kept = {info.ledger_id for info in self.infos}
        known = {info.ledger_id for info in before}
        dropped = [info for info in before if info.ledger_id not in kept]
        if dropped and dropped[-1] is before[-1]:
            self.map.drop_last()
            self.map.drop_first(len(dropped) - 1)
        else:
            self.map.drop_first(len(dropped))
        for info in self.infos:
            if info.ledger_id not in known:
                self.map.append(info.ledger_id, info.entries)
        return dropped

    async def update(self, change: Callable[[LogRecord], LogRecord]) -> None:
        """Write the record; another owner's record ends this log (INV2)."""
        try:
            await self._record.update(change)
        except LedgerFenced as error:
            self._fenced(error)
            raise

    async def discard(self, ledger_id: int, properties: Mapping[str, str], *, is_again: bool = False) -> None:
        """Delete a ledger that no record names any more. If that fails the next trim tries again, and is not reported again; a
        broker that ends before leaves an orphan, which harms nobody. Of a full disk its store tells."""
        try:
            await self._resolver.for_ledger(ledger_id, properties).delete(ledger_id)
        except BraidError as error:
            if not (is_again or isinstance(error, LedgerStoreReadOnly)):
                log.warning("ledger %d of log %s could not be deleted yet: %s", ledger_id, self._log, error)
            if len(self._undeleted) < MAX_UNDELETED:
                self._undeleted[ledger_id] = properties

    async def discard_again(self) -> None:
        """Try again what `discard` could not delete."""
        undeleted, self._undeleted = self._undeleted, {}
        for ledger_id, properties in undeleted.items():
            await self.discard(ledger_id, properties, is_again=True)


def without_empty_end(infos: list[LedgerInfo]) -> list[LedgerInfo]:
    """The list without a last ledger that never got an entry, as a failure leaves it behind."""
    return infos[:-1] if infos and infos[-1].entries == 0 else infos


def _trimmed_position(record: LogRecord, last_shown: Position | None) -> PositionRecord | None:
    if last_shown is None or last_shown.ledger_id < 0:
        return record.trimmed_position
    return PositionRecord(last_shown.ledger_id, last_shown.entry_id)
