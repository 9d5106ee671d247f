"""`GuardedRecord`: a record that only the leader with the highest epoch can change (INV4, "claim before act").

Owns the rule and nothing else: the record carries `leader_epoch`; a new leader first *claims* it by writing its own epoch, and
every write of a leader is a CAS whose new value is computed from what was just read and refused if the stored epoch is higher
than its own. Because the successor claimed first, a late write of a paused leader fails the version check or sees the higher
epoch when it reads again; whoever sees one steps down. What the record means is the business of its users.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

import msgspec

from braid.errors import NotFound, OutcomeUnknown, StoreError, StoreMismatch, StoreUnavailable, VersionConflict
from braid.metadata.api import MetadataStore, Record
from braid.metadata.election import Leadership

ATTEMPTS = 20
"""Re-reads of one change before it is given up."""


class Guarded(Protocol):
    """A `msgspec.Struct` with this field."""

    @property
    def leader_epoch(self) -> int:
        """Of the leader that wrote it last."""
        ...


G = TypeVar("G", bound=Guarded)


class StaleLeader(StoreError):
    """This leader has a successor, or cannot be sure that it has none; it must not act any more."""

    status = 409


class GuardedRecord(Generic[G]):
    """One guarded record as one leader sees it. Changes through the same object take turns."""

    def __init__(
        self, store: MetadataStore, leadership: Leadership, key: str, shape: type[G], *, partition: str | None = None
    ) -> None:
        self._store = store
        self._leadership = leadership
        self._key = key
        self._partition = partition
        self._decoder = msgspec.json.Decoder(shape)
        self._turn = asyncio.Lock()

    async def claim(self) -> G:
        """Put our epoch into the record, before anything else is done in the leader's name. Raises as `change` does."""
        return await self.change(lambda value: value)

    async def change(self, modify: Callable[[G], G]) -> G:
        """Replace the value by `modify` of it, under our epoch; `modify` may run several times and what it raises is passed on.

        Raises StaleLeader if the leadership does not hold or (then it steps down) a higher epoch is stored; NotFound;
        StoreUnavailable (nothing changed); OutcomeUnknown if the write may have been applied and reading back did not tell.
        """
        async with self._turn:
            unsettled: tuple[int, bytes] | None = None  # version and value of a write without a verdict
            for _attempt in range(ATTEMPTS):
                try:
                    record, value = await self._read()
                except StoreUnavailable as error:
                    if unsettled is None:
                        raise
                    raise OutcomeUnknown(
                        f"Whether {self._key} was changed is unknown, and it cannot be read: {error}"
                    ) from error
                if unsettled is not None and record.version != unsettled[0]:
                    if record.value == unsettled[1]:
                        return value
                    raise OutcomeUnknown(
                        f"A change of {self._key} may have been applied, and the record was written again since."
                    )
                changed = self._with_epoch(modify(value))
                body = msgspec.json.encode(changed)
                if not self._leadership.holds():
                    raise StaleLeader(
                        f"The leader of {self._leadership.key} may have a successor, so {self._key} was not changed."
                    )
                try:
                    await self._store.put(
                        self._key, body, expected=record.version, partition=self._partition, index=record.index or None
                    )
                except VersionConflict:
                    continue
                except OutcomeUnknown:
                    unsettled = (record.version, body)
                    continue
                return changed
            if unsettled is not None:
                raise OutcomeUnknown(f"Whether a change of {self._key} was applied is unknown after {ATTEMPTS} attempts.")
            raise StoreUnavailable(f"{self._key} was changed by others {ATTEMPTS} times in a row; try again.")

    async def _read(self) -> tuple[Record, G]:
        record = await self._store.get(self._key, partition=self._partition, fresh=True)
        if record is None:
            raise NotFound(f"The record {self._key} does not exist; it may have been deleted.")
        try:
            value = self._decoder.decode(record.value or b"{}")  # as all readers: an empty one is one of defaults
        except (msgspec.MsgspecError, ValueError) as error:
            raise StoreMismatch(f"The record {self._key} cannot be read: {error}.") from error
        if value.leader_epoch > self._leadership.epoch:
            self._leadership.step_down()
            raise StaleLeader(
                f"{self._key} was claimed by a leader of epoch {value.leader_epoch}, above our {self._leadership.epoch}."
            )
        return record, value

    def _with_epoch(self, value: G) -> G:
        struct = cast(msgspec.Struct, value)
        return cast(G, msgspec.structs.replace(struct, leader_epoch=self._leadership.epoch))
