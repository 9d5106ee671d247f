"""`Tenure`: one session's hold on one ephemeral record, from its creation to its end. What elections and locks are made of.

Owns how such a record is created (the creating put decides, an unknown outcome is resolved by a fresh read), when its holder
may still act, and how it is given up (by version, never after the session ended). A tenure tells whom to ask; it excludes
nobody: who may write is decided by the epoch, checked inside a CAS (INV4). Must not run tasks or call back.

The epoch is the version of the creating put. Versions of a key never repeat and grow through delete and re-create, so every
later holder has a higher one.
"""

from __future__ import annotations

import logging
from typing import Final

from braid.errors import OutcomeUnknown, StoreUnavailable, VersionConflict
from braid.metadata.api import ABSENT, MetadataStore, Record, Session, SessionState
from braid.runtime.clock import Clock

log = logging.getLogger(__name__)
SHOWN_BYTES: Final = 200
"""Of a record that is removed, in the log."""

DEFAULT_RECONCILE_SECONDS: Final = 5.0
"""Between two looks at a record when no watch event came: the longest time a lost event can go unnoticed (INV15)."""
RETRY_SECONDS: Final = 0.5
"""Before a store that refused or gave no verdict is asked again."""
REMOVE_ATTEMPTS: Final = 5


class Tenure:
    """Holding one record."""

    __slots__ = ("_clock", "epoch", "is_over", "key", "session", "version")

    def __init__(self, clock: Clock, session: Session, record: Record) -> None:
        self.key = record.key
        self.epoch = record.version
        """Strictly larger for every later holder of the same key."""
        self.version = record.version
        """Of the record as it is now; the epoch unless the holder updated it."""
        self.session = session
        self.is_over = False
        """Ended for good by its holder, whatever becomes of the record."""
        self._clock = clock

    def holds(self) -> bool:
        """Whether the holder may act now. Asked before each act and never kept: the answer changes with time alone."""
        return not self.is_over and self.session.state is SessionState.CONNECTED and self.seconds_left() > 0

    def seconds_left(self) -> float:
        """Until the session must be renewed."""
        return self.session.good_until() - self._clock.monotonic()

    def has_lapsed(self) -> bool:
        """The session ended, or may have ended for all that this holder knows."""
        return self.session.state in (SessionState.LOST, SessionState.CLOSED) or self.seconds_left() <= 0

    def is_shown_by(self, record: Record | None) -> bool:
        """Whether the record as read is still the one held."""
        return record is not None and record.owner == self.session.id and record.version == self.version

    def follows(self, record: Record | None) -> bool:
        """As `is_shown_by`, for a holder that updates its record: an own update without a verdict may have landed late."""
        if record is None or record.owner != self.session.id or (record.mods == 0 and record.version != self.version):
            return False
        self.version = record.version
        return True


async def take(store: MetadataStore, clock: Clock, key: str, value: bytes, *, adopt: bool = False) -> Tenure | Record | None:
    """Try once to create the record: our tenure, or the record of whoever holds the key, or None if that one just went (try
    again). `adopt` says that an earlier attempt may have succeeded unseen, so that our own record counts as a success.

    Raises SessionLost and StoreUnavailable (nothing was written), and OutcomeUnknown if reading back was impossible too.
    """
    try:
        record: Record | None = await store.put(key, value, expected=ABSENT, ephemeral=True)
    except VersionConflict:
        record = await store.get(key, fresh=True)
        if record is not None and record.owner is None:
            await drop_nobodys(store, record)
            return None
        if record is not None and not (adopt and is_own(store, record, value)):
            return record
    except OutcomeUnknown as unknown:
        try:
            record = await store.get(key, fresh=True)
        except StoreUnavailable as error:
            raise OutcomeUnknown(f"Whether {key} was created is unknown, and it cannot be read: {error}") from unknown
        if record is not None and not is_own(store, record, value):
            return record
    if record is None or record.owner != store.session.id:
        return None
    return Tenure(clock, store.session, record)


async def drop_nobodys(store: MetadataStore, record: Record) -> None:
    """Delete a record that is no session's. Holders write none: somebody edited it by hand or restored it from a copy, and it
    would stand in the way for ever, because no session takes it along when it ends."""
    log.warning("%s is no session's record and is removed: %r", record.key, record.value[:SHOWN_BYTES])
    try:
        await store.delete(record.key, expected=record.version)
    except (VersionConflict, OutcomeUnknown):
        log.info("%s changed before it was removed", record.key)  # the next attempt finds out


def is_own(store: MetadataStore, record: Record, value: bytes) -> bool:
    """Whether the present session of this handle created the record, with this value, and nobody changed it."""
    return record.owner == store.session.id and record.value == value and record.mods == 0


async def remove(store: MetadataStore, clock: Clock, key: str, version: int, session: Session) -> bool:
    """Delete a record of this session by its version, with a few attempts. Never touches a successor, never acts for a session
    that ended (the store drops its records). False if the record may still be there."""
    for attempt in range(REMOVE_ATTEMPTS):
        if attempt:
            await clock.sleep(RETRY_SECONDS)
        if session.state in (SessionState.LOST, SessionState.CLOSED):
            return True
        try:
            await store.delete(key, expected=version)
        except VersionConflict:
            return True  # gone, or somebody else's by now
        except (StoreUnavailable, OutcomeUnknown) as error:
            log.warning("could not give up %s yet: %s", key, error)
        else:
            return True
    return False
