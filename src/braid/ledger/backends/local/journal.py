"""The journal: one file sequence shared by all ledgers, written in commit groups, one sync per group (INV1).

Owns segments `journal-<n>.log`, their roll, their replay and the rule for damage. Blocking; used by one thread at a time. Knows
records as bytes, not what they mean.

Damage: a group is synced before the next is begun and before a newer segment exists. So only the last group of the last segment
can be torn. A bad group is cut if, and only if, it is in the last segment, no valid later group follows it, and bytes are
missing (the file ends early or a 512-byte sector is all zeros). Anything else is corruption and refuses to start.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from braid.errors import EntryCorrupt, LedgerStoreReadOnly
from braid.ledger.backends.local import records
from braid.ledger.backends.local.records import GROUP, HEADER, JOURNAL_MAGIC
from braid.runtime.files import File, FileSystem
from braid.wire.checksum import crc32c

log = logging.getLogger(__name__)

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_PREFIX, _SUFFIX = "journal-", ".log"
_FREE_CHECK_BYTES = 1 << 20
_SCAN_BYTES = 1 << 20
_SECTOR = 512


def segment_name(number: int) -> str:
    return f"{_PREFIX}{number:010}{_SUFFIX}"


def segment_numbers(files: FileSystem, directory: Path) -> list[int]:
    """Numbers of the segments on disk, ascending."""
    return sorted(
        int(name[len(_PREFIX) : -len(_SUFFIX)])
        for name in files.names(directory)
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    )


def no_space(directory: Path) -> str:
    """What is said when the file system itself has no room."""
    return f"No space is left on the disk of {directory}; free some, writing resumes by itself."


class Journal:
    """The writing end. Starts a new segment each time it is opened."""

    def __init__(
        self,
        files: FileSystem,
        directory: Path,
        store_id: bytes,
        salt: Callable[[], bytes],
        *,
        segment_bytes: int,
        reserve_bytes: int,
        sync: bool,
    ) -> None:
        self._files = files
        self._directory = directory
        self._store_id = store_id
        self._new_salt = salt
        self._segment_bytes = segment_bytes
        self._reserve_bytes = reserve_bytes
        self._sync = sync
        self._file: File | None = None
        self._salt = b""
        self._size = 0
        self._room = 0
        """Bytes that may be written before the free space is looked at again."""
        self.refused_bytes = 0
        """Size of the last group for which there was no room."""
        self.segment = 0
        self.sequence = 0
        """Number of the next group."""

    def start(self, segment: int, sequence: int) -> None:
        """Begin segment `segment`, whose first group will be number `sequence`."""
        self.sequence = sequence
        self._begin(segment)

    def append_group(self, payload: bytes, *, from_reserve: bool = False) -> int:
        """Write records as one group and sync it; returns the bytes written. `from_reserve`: also with less than the reserve.

        Out of space: the journal is as before and `LedgerStoreReadOnly` is raised. Any other `OSError` means that the disk can
        no longer be trusted.
        """
        data = records.group(self._salt, self.sequence, payload)
        if not from_reserve:
            self._check_room(len(data))
        if self._size > HEADER.size and self._size + len(data) > self._segment_bytes:
            self.roll()
            data = records.group(self._salt, self.sequence, payload)
        file = self._current()
        try:
            file.append(data)
            if self._sync:
                file.sync()
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            file.truncate(self._size)
            file.sync()  # the group must not come back after a power cut: its writers are told that it was not written
            self.refused_bytes = len(data)
            raise LedgerStoreReadOnly(no_space(self._directory)) from exc
        self._size += len(data)
        self.sequence += 1
        return len(data)

    def roll(self) -> int:
        """Go on in a new segment; returns its number. Everything before is durable then."""
        if not self._sync:
            self._current().sync()
        old = self._current()
        try:
            self._begin(self.segment + 1)
        except OSError as exc:
            if exc.errno not in FULL:
                raise
            raise LedgerStoreReadOnly(no_space(self._directory)) from exc
        old.close()
        return self.segment

    def remove_before(self, segment: int) -> None:
        """Delete segments that a snapshot made superfluous. Touches no file this object writes; any thread may call it."""
        for number in segment_numbers(self._files, self._directory):
            if number < segment:
                self._files.remove(self._directory / segment_name(number))
        self._files.sync_dir(self._directory)

    def close(self) -> None:
        if self._file is not None:
            self._file.sync()
            self._file.close()
            self._file = None

    def _current(self) -> File:
        if self._file is None:
            raise RuntimeError("the journal is not started")
        return self._file

    def _check_room(self, size: int) -> None:
        if size <= self._room:  # one system call per group saved, most of the time
            self._room -= size
            return
        free = self._files.free_bytes(self._directory)
        if free < self._reserve_bytes + size:
            self.refused_bytes = size
            raise LedgerStoreReadOnly(
                f"The disk of {self._directory} is nearly full: a write of {size} bytes would leave less free than the "
                f"{self._reserve_bytes} bytes kept in reserve, as only {free} are free; delete or expire data, or free space "
                "otherwise: writing resumes by itself."
            )
        self._room = min(_FREE_CHECK_BYTES, free - self._reserve_bytes - size)

    def _begin(self, segment: int) -> None:
        salt = self._new_salt()
        path = self._directory / segment_name(segment)
        file = self._files.open(path, create=True)
        try:
            file.truncate(0)  # a leftover of a start or roll that did not finish
            file.append(records.header(JOURNAL_MAGIC, segment, self._store_id, salt, self.sequence))
            file.sync()
            self._files.sync_dir(self._directory)
        except OSError:
            file.close()
            self._undo_begin(path)
            raise
        self._file, self._salt, self.segment, self._size = file, salt, segment, HEADER.size

    def _undo_begin(self, path: Path) -> None:
        """Remove a segment that could not be begun: as long as it exists, a torn group before it would look like damage."""
        try:
            self._files.remove(path)
            self._files.sync_dir(self._directory)
        except OSError as exc:
            raise OSError(errno.EIO, f"cannot remove {path}: {exc}") from exc


class Replay:
    """Reads the groups from a given segment on; cuts a torn tail; `end_segment` and `sequence` say where to go on."""

    def __init__(self, files: FileSystem, directory: Path, store_id: bytes, first_segment: int) -> None:
        self._files = files
        self._directory = directory
        self._store_id = store_id
        self._sequence: int | None = None
        self.end_segment = first_segment
        """First segment number that is free."""
        self.bytes_read = 0
        self._first = first_segment

    @property
    def sequence(self) -> int:
        """Number of the next group."""
        return 1 if self._sequence is None else self._sequence

    def groups(self) -> Iterator[tuple[bytes, str]]:
        """(records, where they stand) of each group, in order."""
        numbers = [n for n in segment_numbers(self._files, self._directory) if n >= self._first]
        expected = range(self._first, self._first + max(len(numbers), int(self._first > 1)))
        if numbers != list(expected):  # only a store that was just made may lack its first segment
            missing = min(set(expected) - set(numbers))
            raise EntryCorrupt(
                f"The journal segment {self._directory / segment_name(missing)} is missing; restore it from a backup."
            )
        for number in numbers:
            is_last = number == numbers[-1]
            path = self._directory / segment_name(number)
            file = self._files.open(path)
            try:
                if is_last and file.size() <= HEADER.size and not self._has_header(file):
                    log.warning("journal segment %s was never begun; it is written anew", path)
                    return
                yield from self._segment(file, path, number, is_last)
                if is_last:
                    file.sync()  # what was read from the page cache must not vanish after it was served
            finally:
                file.close()
            self.end_segment = number + 1

    def _has_header(self, file: File) -> bool:
        try:
            records.read_header(file.read(0, HEADER.size), JOURNAL_MAGIC, "segment")
        except EntryCorrupt:
            return False
        return True

    def _segment(self, file: File, path: Path, number: int, is_last: bool) -> Iterator[tuple[bytes, str]]:
        head = records.read_header(file.read(0, HEADER.size), JOURNAL_MAGIC, f"The journal segment {path}")
        if head.number != number or head.store_id != self._store_id:
            raise EntryCorrupt(f"The journal segment {path} belongs to another place or store; restore the right one.")
        if self._sequence is not None and head.first_sequence != self._sequence:
            raise EntryCorrupt(
                f"The journal segment before {path} lost its end: group {self._sequence} is missing; restore it from a backup."
            )
        self._sequence = head.first_sequence
        at, size = HEADER.size, file.size()
        while at < size:
            payload = self._group(file, at, head.salt)
            if payload is None:
                self._cut(file, path, at, head.salt, is_last)
                return
            yield payload, f"{path} at byte {at}"
            at += GROUP.size + len(payload)
            self.bytes_read += GROUP.size + len(payload)
            self._sequence += 1

    def _group(self, file: File, at: int, salt: bytes) -> bytes | None:
        found = records.group_header(file.read(at, GROUP.size), salt)
        if found is None or found[0] != self._sequence:
            return None
        _, size, crc = found
        payload = file.read(at + GROUP.size, size)
        return payload if len(payload) == size and crc32c(payload) == crc else None

    def _cut(self, file: File, path: Path, at: int, salt: bytes, is_last: bool) -> None:
        """Cut a torn last group at `at`; refuse if it is anything else."""
        remedy = "restore the file from a backup; confirmed entries may be lost otherwise."
        if not is_last:
            raise EntryCorrupt(f"The journal {path} is damaged at byte {at}, before its end; {remedy}")
        if self._later_group(file, at, salt):
            raise EntryCorrupt(f"The journal {path} is damaged at byte {at} and intact groups follow; {remedy}")
        if not self._is_incomplete(file, at, salt):
            raise EntryCorrupt(f"The last group of the journal {path}, at byte {at}, is complete but damaged; {remedy}")
        log.warning("journal %s: cut a torn group of %d bytes at byte %d", path, file.size() - at, at)
        file.truncate(at)

    def _later_group(self, file: File, at: int, salt: bytes) -> bool:
        """Whether a valid group with a later number stands after `at`."""
        start, size = at + 1, file.size()
        while start < size:
            chunk = file.read(start, _SCAN_BYTES + len(salt))
            hit = chunk.find(salt)
            while hit >= 0:
                found = records.group_header(file.read(start + hit, GROUP.size), salt)
                if found is not None and found[0] > self.sequence:
                    return True
                hit = chunk.find(salt, hit + 1)
            start += _SCAN_BYTES
        return False

    def _is_incomplete(self, file: File, at: int, salt: bytes) -> bool:
        """Whether bytes of the group at `at` are missing, as after a power cut, rather than changed."""
        size = file.size()
        found = records.group_header(file.read(at, GROUP.size), salt)
        if size - at < GROUP.size or (found is not None and at + GROUP.size + found[1] > size):
            return True
        zeros = bytes(_SECTOR)
        first = at - at % _SECTOR
        for start in range(first, size, _SCAN_BYTES):
            chunk = file.read(start, _SCAN_BYTES)
            if start == first:
                chunk = bytes(at - first) + chunk[at - first :]
            if any(chunk[i : i + _SECTOR] == zeros[: len(chunk[i : i + _SECTOR])] for i in range(0, len(chunk), _SECTOR)):
                return True
        return False
