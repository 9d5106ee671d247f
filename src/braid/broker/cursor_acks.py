"""`CursorAcks` of a managed cursor, and plain acknowledgments that go around what transactions hold.

The adapter between pending acknowledgments (`braid.txn`) and the managed ledger. Decides nothing about transactions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from braid.errors import NotReady
from braid.managedledger.cursor import ManagedCursor
from braid.managedledger.log import ManagedLedger
from braid.model.ackset import from_words as mask_from_words
from braid.model.ackset import full
from braid.model.positions import Position
from braid.txn.ack_conflicts import WHOLE, Holds
from braid.txn.api import Ack
from braid.wire.commands import signed64
from braid.wire.messages import MessageIdData


class ManagedCursorAcks:
    """A durable cursor as pending acknowledgments see it."""

    def __init__(self, log: ManagedLedger, cursor: ManagedCursor) -> None:
        self._log = log
        self._cursor = cursor

    @property
    def incarnation(self) -> str:
        return self._log.incarnation

    @property
    def mark_delete(self) -> Position:
        return self._cursor.mark_delete

    @property
    def last_position(self) -> Position:
        return self._log.last_position

    def position_before(self, position: Position) -> Position:
        return self._log.position_before(position)

    def is_acknowledged(self, position: Position) -> bool:
        return self._cursor.is_acknowledged(position)

    def unacked_mask(self, position: Position) -> int | None:
        return self._cursor.unacked_mask(position)

    def acknowledge(self, positions: Sequence[Position], masks: Mapping[Position, int]) -> None:
        for position, mask in masks.items():
            self._cursor.acknowledge_batch(position, mask)
        if positions:
            self._cursor.acknowledge(positions)

    def acknowledge_cumulative(self, position: Position, mask: int | None) -> None:
        self._cursor.acknowledge_cumulative(position, mask)

    async def flush(self) -> None:
        """Raises NotReady while there is more to remember than a cursor stores: then the ops must go on remembering it."""
        await self._cursor.flush()
        limit = self._log.config.max_persisted_ranges
        if self._cursor.ranges_count > limit:
            raise NotReady(
                f"The cursor {self._cursor.name} of {self._log.name} has {self._cursor.ranges_count} gaps and stores {limit}; "
                "acknowledge what is missing between them."
            )

    async def check_owner(self) -> None:
        await self._log.check_owner()


def acks_named(log: ManagedLedger, ids: Sequence[MessageIdData]) -> list[Ack] | None:
    """The acknowledgments a command names, as far as memory tells how large their batches are; None = ask `acks_read`."""
    acks: list[Ack] = []
    for named in ids:
        position = Position(signed64(named.ledgerId), signed64(named.entryId))
        if not named.ack_set:
            acks.append(Ack(position))
            continue
        size = max(named.batch_size, 0)
        if not size:
            found = log.read_cached(position, 1, 1) if position <= log.last_position else []
            if found is None:
                return None
            size = found[0].messages if found and (found[0].ledger_id, found[0].entry_id) == position else 0
        acks.append(_part(position, named, size))
    return acks


async def acks_read(log: ManagedLedger, ids: Sequence[MessageIdData]) -> list[Ack]:
    """The same, reading the entries whose batch size the client did not say."""
    acks: list[Ack] = []
    for named in ids:
        known = acks_named(log, [named])
        if known is None:
            position = Position(signed64(named.ledgerId), signed64(named.entryId))
            found = await log.read(position, 1, 1)
            size = found[0].messages if found and (found[0].ledger_id, found[0].entry_id) == position else 0
            known = [_part(position, named, size)]
        acks += known
    return acks


def _part(position: Position, named: MessageIdData, size: int) -> Ack:
    """Some messages of a batch; bits beyond its end mean nothing."""
    mask = mask_from_words(named.ack_set)
    return Ack(position, mask & full(size) if size else mask, size)


def acknowledge_around(log: ManagedLedger, cursor: ManagedCursor, holds: Holds, position: Position, mask: int | None) -> None:
    """A plain cumulative acknowledgment that leaves out what transactions hold: that is ignored until their outcome. Costs as
    much as is held, not as much as is acknowledged."""
    upto = holds.highest_upto()
    held = holds.positions(position)
    if position > log.last_position or (not held and upto is None):
        cursor.acknowledge_cumulative(position, mask)
        return
    at = cursor.mark_delete
    if upto is not None:  # everything before it is held
        at = max(at, log.position_before(upto.position))
        held = sorted({*held, upto.position})
    last = log.position_before(position) if mask else position
    spans: list[tuple[Position, Position]] = []
    for each in held:
        if at < each <= last:
            if (before := log.position_before(each)) > at:
                spans.append((at, before))
            at = each
    if last > at:
        spans.append((at, last))
    for each in held:
        if cursor.mark_delete < each <= last and (bits := holds.held_bits(each)) != WHOLE:
            cursor.acknowledge_batch(each, bits)
    if spans:
        cursor.acknowledge_spans(spans)
    if mask and (bits := holds.held_bits(position)) != WHOLE and position > cursor.mark_delete:
        cursor.acknowledge_batch(position, mask | bits)
