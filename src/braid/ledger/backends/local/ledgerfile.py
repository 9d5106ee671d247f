"""Ledger files: where entries live for good, one file per ledger, written lazily in blocks.

`BlockWriter` appends blocks, remembers which files are dirty and syncs them at a checkpoint; `BlockReader` reads entries by
a sparse index (one item per block) and verifies every checksum. Both are blocking, each is used by one thread, and both keep a
bounded number of files open. How many bytes of a file count is told by the caller: bytes beyond are leftovers of an unfinished
flush, invisible to readers and cut by the next writer.

    block = magic 4 · ledger id u64 · first entry u64 · count u32 · body size u32 · table crc u32 · crc of the fields before u32
            · table: (size u32, crc32c u32) per entry · body: the entries, one after the other
"""

from __future__ import annotations

import struct
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from braid.errors import EntryCorrupt
from braid.ledger.backends.local import records
from braid.ledger.backends.local.journal import FULL
from braid.ledger.backends.local.records import HEADER, LEDGER_MAGIC
from braid.runtime.files import File, FileSystem
from braid.wire.checksum import crc32c

_BLOCK = struct.Struct(">4sQQIIII")
_BLOCK_FIELDS = struct.Struct(">4sQQIII")
_MAGIC = b"BLK1"
_CRC = struct.Struct(">I")


def ledger_path(directory: Path, ledger_id: int) -> Path:
    """Files are spread over 256 folders."""
    return directory / f"{ledger_id & 0xFF:02x}" / f"{ledger_id}.ledger"


def open_file_share(files: FileSystem, open_files: int) -> int:
    """How many files the writer, and as many the reader, may keep open. Too few cost dearly with many ledgers: a file that was
    written to is synced before it is closed."""
    return max(1, min(open_files, files.open_limit() // 4) // 2)


def encode_block(ledger_id: int, first: int, entries: Sequence[bytes]) -> bytes:
    """One block holding `entries`, numbered from `first`."""
    numbers: list[int] = []
    for entry in entries:
        numbers += (len(entry), crc32c(entry))
    table = struct.pack(f">{len(numbers)}I", *numbers)
    body = b"".join(entries)
    fields = _BLOCK_FIELDS.pack(_MAGIC, ledger_id, first, len(entries), len(body), crc32c(table))
    return b"".join((fields, _CRC.pack(crc32c(fields)), table, body))


class BlockWriter:
    """Appends to ledger files; one thread."""

    def __init__(self, files: FileSystem, directory: Path, store_id: bytes, *, block_bytes: int, open_files: int) -> None:
        self._files = files
        self._directory = directory
        self._store_id = store_id
        self._block_bytes = block_bytes
        self._max_open = open_files
        self._open: OrderedDict[int, File] = OrderedDict()
        self._dirty: set[int] = set()
        self._folders: set[Path] = set()
        self._dirty_folders: set[Path] = set()

    def append(self, ledger_id: int, file_bytes: int, first: int, entries: Sequence[bytes]) -> int:
        """Write entries after the first `file_bytes` bytes of the file; returns the new count. Not synced. Out of space: what
        was written is given back at once: others need the room, to free some."""
        file = self._file(ledger_id)
        if file.size() > file_bytes:
            file.truncate(file_bytes)
        elif file.size() < file_bytes:
            raise EntryCorrupt(
                f"The file of ledger {ledger_id} has {file.size()} bytes but {file_bytes} were stored; "
                "restore it from a backup."
            )
        self._dirty.add(ledger_id)
        try:
            self._append(file, ledger_id, file_bytes, first, entries)
        except OSError as exc:
            if exc.errno in FULL:
                file.truncate(file_bytes)
            raise
        return file.size()

    def _append(self, file: File, ledger_id: int, file_bytes: int, first: int, entries: Sequence[bytes]) -> None:
        if file_bytes == 0:
            file.append(records.header(LEDGER_MAGIC, ledger_id, self._store_id))
        start = 0
        while start < len(entries):
            size, end = 0, start
            while end < len(entries) and (end == start or size + len(entries[end]) <= self._block_bytes):
                size += len(entries[end])
                end += 1
            file.append(encode_block(ledger_id, first + start, entries[start:end]))
            start = end

    def sync(self) -> None:
        """Make everything appended so far durable."""
        for ledger_id in sorted(self._dirty):
            if ledger_id in self._dirty:  # opening another one may have synced and closed it
                self._file(ledger_id).sync()
                self._dirty.discard(ledger_id)
        for folder in sorted(self._dirty_folders):
            self._files.sync_dir(folder)
        self._dirty_folders.clear()

    def remove(self, ledger_ids: Sequence[int]) -> None:
        """Delete the files of deleted ledgers, if there are any."""
        for ledger_id in ledger_ids:
            if (file := self._open.pop(ledger_id, None)) is not None:
                file.close()
            self._dirty.discard(ledger_id)
            self._files.remove(ledger_path(self._directory, ledger_id))

    def close(self) -> None:
        for file in self._open.values():
            file.close()
        self._open.clear()

    def _file(self, ledger_id: int) -> File:
        file = self._open.get(ledger_id)
        if file is not None:
            self._open.move_to_end(ledger_id)
            return file
        while len(self._open) >= self._max_open:
            old_id, old = self._open.popitem(last=False)
            if old_id in self._dirty:
                old.sync()  # now, while the descriptor that would report a failed write-back is still open
                self._dirty.discard(old_id)
            old.close()
        path = ledger_path(self._directory, ledger_id)
        folder = path.parent
        if folder not in self._folders:
            self._files.make_dir(folder)
            self._folders.add(folder)
        try:
            file = self._files.open(path)
        except FileNotFoundError:
            file = self._files.open(path, create=True)
            self._dirty_folders.add(folder)
        self._open[ledger_id] = file
        return file


class _Block:
    """The decoded table of one block."""

    __slots__ = ("at", "crcs", "first", "offsets")

    def __init__(self, at: int, first: int, offsets: list[int], crcs: tuple[int, ...]) -> None:
        self.at = at
        self.first = first
        self.offsets = offsets
        """File offset of each entry, and of the end."""
        self.crcs = crcs


class _Indexed:
    """An open file with the index of its blocks known so far."""

    __slots__ = ("block", "ends_at", "file", "firsts", "next_entry", "offsets")

    def __init__(self, file: File) -> None:
        self.file = file
        self.firsts = array("Q")
        self.offsets = array("Q")
        self.ends_at = HEADER.size
        self.next_entry = 0
        self.block: _Block | None = None


class BlockReader:
    """Reads entries; one thread."""

    def __init__(self, files: FileSystem, directory: Path, store_id: bytes, *, open_files: int) -> None:
        self._files = files
        self._directory = directory
        self._store_id = store_id
        self._max_open = open_files
        self._open: OrderedDict[int, _Indexed] = OrderedDict()

    def read(self, ledger_id: int, file_bytes: int, first: int, last: int, max_bytes: int) -> list[bytes]:
        """Entries `first..last`, all of them within the first `file_bytes` bytes; fewer, but at least one, with `max_bytes`."""
        indexed = self._indexed(ledger_id)
        self._extend(indexed, ledger_id, file_bytes)
        if last >= indexed.next_entry:
            raise EntryCorrupt(
                f"The file of ledger {ledger_id} ends before entry {indexed.next_entry}, but entry {last} was stored; "
                "restore it from a backup."
            )
        found: list[bytes] = []
        room = max_bytes if max_bytes > 0 else file_bytes
        while first <= last:
            block = self._block(indexed, ledger_id, first)
            start = first - block.first
            end = min(last - block.first + 1, len(block.crcs))
            if (fits := bisect_right(block.offsets, block.offsets[start] + room) - 1) < end:
                end = fits if fits > start or found else start + 1
            if end <= start:
                break
            self._entries(indexed.file, ledger_id, block, start, end, found)
            room -= block.offsets[end] - block.offsets[start]
            first = block.first + end
            if room <= 0 or (end < len(block.crcs) and first <= last):
                break
        return found

    def length_before(self, ledger_id: int, file_bytes: int, entry_id: int) -> int:
        """Sum of the sizes of the entries before this one, which is within the first `file_bytes` bytes: from its block's table
        and what the blocks before it have besides entries."""
        indexed = self._indexed(ledger_id)
        self._extend(indexed, ledger_id, file_bytes)
        if entry_id >= indexed.next_entry:
            raise EntryCorrupt(
                f"The file of ledger {ledger_id} ends before entry {indexed.next_entry}, but entry {entry_id} was stored; "
                "restore it from a backup."
            )
        block = self._block(indexed, ledger_id, entry_id)
        number = bisect_right(indexed.firsts, entry_id) - 1
        before = block.at - HEADER.size - number * _BLOCK.size - 8 * block.first
        return before + block.offsets[entry_id - block.first] - block.offsets[0]

    def forget(self, ledger_ids: Sequence[int]) -> None:
        """Close the files of deleted ledgers."""
        for ledger_id in ledger_ids:
            if (indexed := self._open.pop(ledger_id, None)) is not None:
                indexed.file.close()

    def close(self) -> None:
        self.forget(list(self._open))

    def _entries(self, file: File, ledger_id: int, block: _Block, start: int, end: int, found: list[bytes]) -> None:
        base = block.offsets[start]
        data = file.read(base, block.offsets[end] - base)
        for at in range(start, end):
            entry = data[block.offsets[at] - base : block.offsets[at + 1] - base]
            if len(entry) != block.offsets[at + 1] - block.offsets[at] or crc32c(entry) != block.crcs[at]:
                raise EntryCorrupt(
                    f"Entry {block.first + at} of ledger {ledger_id} fails its checksum at byte {block.offsets[at]} of "
                    f"{ledger_path(self._directory, ledger_id)}; restore the file from a backup."
                )
            found.append(entry)

    def _indexed(self, ledger_id: int) -> _Indexed:
        indexed = self._open.get(ledger_id)
        if indexed is not None:
            self._open.move_to_end(ledger_id)
            return indexed
        path = ledger_path(self._directory, ledger_id)
        try:
            file = self._files.open(path)
        except FileNotFoundError:
            raise EntryCorrupt(f"The file {path} of ledger {ledger_id} is missing; restore it from a backup.") from None
        try:
            head = records.read_header(file.read(0, HEADER.size), LEDGER_MAGIC, f"The ledger file {path}")
            if head.number != ledger_id or head.store_id != self._store_id:
                raise EntryCorrupt(f"The ledger file {path} belongs to another ledger or store; restore the right one.")
        except EntryCorrupt:
            file.close()
            raise
        while len(self._open) >= self._max_open:
            self._open.popitem(last=False)[1].file.close()
        indexed = self._open[ledger_id] = _Indexed(file)
        return indexed

    def _extend(self, indexed: _Indexed, ledger_id: int, file_bytes: int) -> None:
        """Walk block headers up to `file_bytes`."""
        while indexed.ends_at < file_bytes:
            data = indexed.file.read(indexed.ends_at, _BLOCK.size)
            where = f"{ledger_path(self._directory, ledger_id)} at byte {indexed.ends_at}"
            if len(data) < _BLOCK.size:
                raise EntryCorrupt(f"The ledger file {where} ends too early; restore it from a backup.")
            magic, owner, first, count, body, _, crc = _BLOCK.unpack(data)
            if magic != _MAGIC or crc32c(data[:-4]) != crc or owner != ledger_id or first != indexed.next_entry:
                raise EntryCorrupt(f"The ledger file {where} has a damaged block; restore it from a backup.")
            indexed.firsts.append(first)
            indexed.offsets.append(indexed.ends_at)
            indexed.ends_at += _BLOCK.size + 8 * count + body
            indexed.next_entry = first + count

    def _block(self, indexed: _Indexed, ledger_id: int, entry_id: int) -> _Block:
        at = indexed.offsets[bisect_right(indexed.firsts, entry_id) - 1]
        if indexed.block is not None and indexed.block.at == at:
            return indexed.block
        header = indexed.file.read(at, _BLOCK.size)
        _, _, first, count, _, table_crc, crc = _BLOCK.unpack(header)
        table = indexed.file.read(at + _BLOCK.size, 8 * count) if crc32c(header[:-4]) == crc else b""
        if len(table) < 8 * count or crc32c(table) != table_crc:
            raise EntryCorrupt(
                f"The block at byte {at} of {ledger_path(self._directory, ledger_id)} has a damaged table; "
                "restore the file from a backup."
            )
        numbers = struct.unpack(f">{2 * count}I", table)
        start = at + _BLOCK.size + len(table)
        indexed.block = _Block(at, first, list(accumulate(numbers[::2], initial=start)), numbers[1::2])
        return indexed.block
