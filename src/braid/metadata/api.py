"""`MetadataStore`: the port through which every versioned record is read, decided and watched.

Owns the interface and the values that cross it, and promises only what every backend can keep: single-record CAS, watches
that converge on the state (not on every event), scans that are no snapshot unless the capabilities say so. Holds no state and
does no I/O. Rules for callers: decide by the outcome of a CAS, never by a read; after `OutcomeUnknown` read the record and look
for your own write; never trust a watch for exclusion (INV15); never assume an order between two partitions.

A key is a path such as `/managed-ledgers/t/ns/topic`: the last component is the record's *name*, the rest is its *collection*.
A collection lists the records directly inside it and nothing else; it needs no record of its own. Names and secondary keys
are ordered by their UTF-8 bytes and contain no `/`; `braid.metadata.names.encode_name` turns any text into a name.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from enum import Enum
from typing import Final, Protocol, TypeAlias

import msgspec

ABSENT: Final = -1
"""As `expected`: the key must not exist."""


class Record(msgspec.Struct, frozen=True):
    """A value and what a caller may condition on."""

    key: str
    value: bytes
    version: int
    """Opaque: compare for equality, pass back as `expected`."""
    mods: int
    """Updates since it was (re)created; 0 = untouched."""
    created_ms: int
    modified_ms: int
    owner: str | None = None
    """Session id if ephemeral."""
    mine: bool = False
    """Owned by the live session of the handle that read it."""
    index: Mapping[str, str] = {}

    @property
    def name(self) -> str:
        """The last component of the key."""
        return self.key.rpartition("/")[2]


class Span(msgspec.Struct, frozen=True):
    """Names n of one collection with lo <= n < hi, in byte order; `None` is open. The top-level collection is `/`."""

    parent: str
    lo: str | None = None
    hi: str | None = None


class IndexSpan(msgspec.Struct, frozen=True):
    """Index entries s with lo <= s < hi, ordered by (s, key); `None` is open. Index names are store-wide."""

    name: str
    lo: str | None = None
    hi: str | None = None

    @classmethod
    def exactly(cls, name: str, secondary: str) -> IndexSpan:
        """The span that holds one secondary key and nothing else."""
        return cls(name, secondary, secondary + "\x00")


class Put(msgspec.Struct, frozen=True):
    """A record is there, new or changed."""

    record: Record


class Delete(msgspec.Struct, frozen=True):
    """A record is gone, or no longer in the watched range."""

    key: str


class Synced(msgspec.Struct, frozen=True):
    """Everything committed before this point has been delivered."""

    rebuilt: bool
    """True after a gap: the preceding events were a computed difference."""


Event: TypeAlias = Put | Delete | Synced


class SessionState(Enum):
    """How sure a handle is of its session."""

    CONNECTED = "connected"
    """Heartbeats are answered."""
    SUSPENDED = "suspended"
    """The link is down; ephemerals may still exist."""
    LOST = "lost"
    """Expired, or assumed so by the local deadline."""
    CLOSED = "closed"


class Session(Protocol):
    """The lifetime that ephemeral records hang on. A handle replaces a lost session by a new one when it is next used."""

    id: str
    timeout: float
    state: SessionState

    def good_until(self) -> float:
        """Monotonic time until which no correct store can have expired us. Leaders check it before each act."""
        ...

    async def wait_lost(self) -> None:
        """Return once this session is LOST or CLOSED; never raises because of the link."""
        ...


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a backend gives beyond, or short of, the common promises."""

    linearizable_get: bool
    snapshot_scan: bool
    unique_versions: bool
    """Versions of a key never repeat, even through delete and re-create."""
    native_index: bool
    targeted_index_watch: bool
    """Watching an index slice costs in proportion to that slice."""
    max_value: int
    """Bytes."""
    max_name: int
    """Bytes of a name or secondary key in UTF-8."""


class MetadataStore(Protocol):
    """One handle on the store: its own session, one event loop.

    There is no batch call: operations issued concurrently share round trips and commits, and each keeps its own outcome.
    Errors: VersionConflict, StoreUnavailable (certainly not applied), OutcomeUnknown (sent, no verdict), SessionLost,
    ValueTooLarge, Closed, and InvalidArgument for a caller's mistake.
    """

    @property
    def session(self) -> Session:
        """The current session; keep the object to learn of its end."""
        ...

    @property
    def capabilities(self) -> Capabilities: ...

    async def get(self, key: str, *, partition: str | None = None, fresh: bool = False) -> Record | None:
        """The record or None. `fresh` pays whatever the backend needs so that writes acknowledged anywhere before the call
        are visible."""
        ...

    async def put(
        self,
        key: str,
        value: bytes,
        *,
        expected: int | None = None,
        ephemeral: bool = False,
        partition: str | None = None,
        index: Mapping[str, str] | None = None,
    ) -> Record:
        """Write one record; `expected` None = upsert, ABSENT = create, n = replace that version.

        `index` replaces all of the record's entries (None = no entries), atomically with the value. `ephemeral` ties the
        record to the session and cannot be combined with `index`. A record keeps one partition for life; readers must name it.
        """
        ...

    async def append(
        self,
        prefix: str,
        value: bytes,
        *,
        partition: str,
        deltas: Sequence[int] = (1,),
        index: Mapping[str, str] | None = None,
    ) -> Record:
        """Create `prefix-<20 digits>...` with store-assigned numbers, each higher than every one still stored under the
        prefix; returns the record with its real key. Not idempotent: after OutcomeUnknown a retry may append twice."""
        ...

    async def delete(self, key: str, *, expected: int | None = None, partition: str | None = None) -> bool:
        """Remove the record and its index entries. False if there was none (VersionConflict if a version was expected)."""
        ...

    async def delete_span(self, span: Span, *, partition: str | None = None, keep_last: bool = False) -> None:
        """Remove a slice of a collection, idempotent, not atomic. `keep_last` spares the highest name in the span: required
        when trimming a sequence (see `append`)."""
        ...

    def names(self, span: Span, *, partition: str | None = None, fresh: bool = False) -> AsyncIterator[str]:
        """Names only, in order. `fresh` as in `get`."""
        ...

    def scan(
        self, span: Span | IndexSpan, *, partition: str | None = None, limit: int | None = None, fresh: bool = False
    ) -> AsyncIterator[Record]:
        """Records in order (by name, or by secondary key then key). Not a snapshot unless the capabilities say so; never
        yields a record that does not match at the time it was read. `fresh` as in `get`."""
        ...

    def watch(
        self, what: str | Span | IndexSpan, *, recursive: bool = False, partition: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Event]]:
        """Current contents as Puts, then Synced, then changes. `recursive` (with a key) covers the key and everything below it.

        Folding the events always converges on the store's state, across reconnects, failovers and session changes.
        Intermediate values of a key may be skipped; the order per key never inverts; a delete that is not followed by a
        re-create is never skipped. A slow reader costs memory proportional to the keys in range, not to the changes.
        """
        ...

    def follow(
        self, prefix: str, *, partition: str, after: str | None = None
    ) -> AbstractAsyncContextManager[AsyncIterator[Record]]:
        """Tail a sequence: every stored record whose key is above `after`, in order, then new ones as they are appended. Skips
        none that still exists when it is read."""
        ...

    async def close(self) -> None:
        """Flush, end the session (dropping its ephemerals), release everything. Idempotent."""
        ...
