"""File twins for tests: a disk that forgets, fills up, fails and decays.

`ForgetfulFiles` is an in-memory `FileSystem` that keeps what was synced apart from what was not. `power_cut()` gives the disk
as found after a reboot: unsynced bytes are gone, or a torn part of them is there; unsynced directory changes are undone from
some point on. All choices come from the given generator, so a seed repeats a run. Simulation only; nothing here is fast.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Literal, Protocol

from braid.errors import DataDirectoryBusy
from braid.runtime.files import DirectoryLock, File

_SECTOR = 512

Operation = Literal["append", "sync", "truncate", "open", "remove", "replace", "sync_dir"]

Change = tuple[tuple[Path, "_Content | None"], ...]
"""What one directory operation did: new content of a name, or None for gone."""


class Chooser(Protocol):
    """The part of `random.Random` that decides what survives."""

    def random(self) -> float: ...

    def randint(self, a: int, b: int) -> int: ...


class _Content:
    """The bytes of a file: as the process sees them, and as they are on the platter."""

    __slots__ = ("agreed", "data", "durable", "ghost")

    def __init__(self, data: bytes = b"") -> None:
        self.data = bytearray(data)
        self.durable = bytearray(data)
        self.agreed = len(data)
        """Both are equal up to here."""
        self.ghost: bytes | None = None
        """The bytes before a truncation that was not synced; they may have reached the platter by themselves."""

    def sync(self) -> None:
        self.durable[self.agreed :] = self.data[self.agreed :]
        self.agreed = len(self.data)
        self.ghost = None

    def truncate(self, size: int) -> None:
        if self.ghost is None and size < len(self.data):
            self.ghost = bytes(self.data)
        del self.data[size:]
        self.data.extend(bytes(size - len(self.data)))
        self.agreed = min(self.agreed, size)

    def after_power_cut(self, rng: Chooser) -> bytes:
        """What a reboot finds: the synced bytes and, of the others, nothing, a beginning, or some sectors among zeros."""
        if self.ghost is not None and rng.random() < 0.5:
            return (
                self.ghost[: rng.randint(len(self.durable), len(self.ghost))]
                if len(self.ghost) > len(self.durable)
                else self.ghost
            )
        if rng.random() < 0.3 or (len(self.durable) > self.agreed and rng.random() < 0.5):
            return bytes(self.durable)
        fresh = bytes(self.data[self.agreed :])
        if rng.random() < 0.6:
            return bytes(self.data[: self.agreed]) + fresh[: rng.randint(0, len(fresh))]
        torn = bytearray(fresh)
        lost = rng.random()
        boundary = -self.agreed % _SECTOR
        for start in (0, *range(boundary, len(torn), _SECTOR)):
            end = min(boundary if start == 0 and boundary else start + _SECTOR, len(torn))
            if rng.random() < lost:
                torn[start:end] = bytes(end - start)
        return bytes(self.data[: self.agreed] + torn)


class _OpenFile:
    """A handle on a `_Content`; dead after a power cut."""

    __slots__ = ("_content", "_disk", "_is_closed", "_is_late", "_name")

    def __init__(self, disk: ForgetfulFiles, name: str, content: _Content) -> None:
        self._disk = disk
        self._name = name
        self._content = content
        self._is_closed = False
        self._is_late = False

    def append(self, data: bytes) -> int:
        self._check()
        if self._is_late:
            self._content.sync()
            self._is_late = False
        start = len(self._content.data)
        taken, error = self._disk.admit(self._name, len(data))
        self._content.data += data[:taken]
        if error is not None:
            try:
                raise error
            finally:
                del error  # or it and this frame hold each other, and the callers' frames with what they write
        return start

    def read(self, offset: int, size: int) -> bytes:
        self._check()
        return bytes(self._content.data[offset : offset + size])

    def size(self) -> int:
        return len(self._content.data)

    def truncate(self, size: int) -> None:
        self._check()
        self._disk.step("truncate", self._name)
        self._content.truncate(size)

    def sync(self) -> None:
        self._check()
        if self._disk.step("sync", self._name, self._content.sync):
            self._is_late = True
        else:
            self._content.sync()

    def close(self) -> None:
        self._is_closed = True

    def _check(self) -> None:
        if self._is_closed:
            raise OSError(errno.EBADF, "the file is closed", self._name)
        self._disk.check_power()


class _Held:
    """The lock of a directory."""

    __slots__ = ("_directory", "_locks")

    def __init__(self, locks: set[Path], directory: Path) -> None:
        self._locks = locks
        self._directory = directory

    def release(self) -> None:
        self._locks.discard(self._directory)


class ForgetfulFiles:
    """An in-memory disk. With `early_receipt` it plays a journal whose syncs return before they happen, for files whose name
    starts with that text: the planted bug "receipt before fsync"."""

    def __init__(self, rng: Chooser, *, capacity: int = 1 << 40, early_receipt: str = "") -> None:
        self._rng = rng
        self._early_receipt = early_receipt
        self._names: dict[Path, _Content] = {}
        self._durable: dict[Path, _Content] = {}
        self._changes: dict[Path, list[Change]] = {}
        self._folders: set[Path] = set()
        self._locks: set[Path] = set()
        self._faults: list[tuple[Operation, str, int]] = []
        self._cut_in = -1
        self._is_off = False
        self.capacity = capacity
        """Bytes the disk holds; beyond, appends fail with ENOSPC after writing what fits."""
        self.steps = 0
        """Changing operations so far; `cut_after` counts these."""

    # Faults

    def fail(self, operation: Operation, name: str, code: int) -> None:
        """Let the next such operation on a file whose name contains `name` fail with this errno."""
        self._faults.append((operation, name, code))

    def flip(self, path: Path, offset: int, bit: int = 0) -> None:
        """Change one bit of a file, on the platter too."""
        content = self._names[path]
        content.data[offset] ^= 1 << bit
        if offset < content.agreed:
            content.durable[offset] ^= 1 << bit

    def cut_after(self, steps: int) -> None:
        """Switch the power off in the middle of the changing operation that comes after so many others."""
        self._cut_in = steps

    def power_cut(self) -> ForgetfulFiles:
        """The disk after a reboot; this object and its files answer EIO from now on."""
        self._is_off = True
        found = ForgetfulFiles(self._rng, capacity=self.capacity, early_receipt=self._early_receipt)
        found._folders = set(self._folders)
        names = dict(self._durable)
        for changes in self._changes.values():
            for change in changes[: self._rng.randint(0, len(changes))]:
                _apply(change, names)
        for path in sorted(names):
            found._names[path] = _Content(names[path].after_power_cut(self._rng))
        found._durable = dict(found._names)
        return found

    def paths(self) -> list[Path]:
        """All files, sorted."""
        return sorted(self._names)

    # FileSystem

    def open(self, path: Path, *, create: bool = False) -> File:
        self.check_power()
        content = self._names.get(path)
        if content is None:
            if not create or path.parent not in self._folders:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
            self.step("open", path.name)
            content = _Content()
            self._change((path, content))
        return _OpenFile(self, path.name, content)

    def exists(self, path: Path) -> bool:
        self.check_power()
        return path in self._names or path in self._folders

    def names(self, directory: Path) -> list[str]:
        self.check_power()
        if directory not in self._folders:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(directory))
        return sorted(path.name for path in (*self._names, *self._folders) if path.parent == directory and path != directory)

    def make_dir(self, directory: Path) -> None:
        self.check_power()
        self._folders.update((directory, *directory.parents))

    def remove(self, path: Path) -> None:
        self.check_power()
        if path in self._names:
            self.step("remove", path.name)
            self._change((path, None))

    def replace(self, source: Path, target: Path) -> None:
        self.check_power()
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "only renames inside a directory are modelled", str(target))
        self.step("replace", target.name)
        self._change((target, self._names[source]), (source, None))

    def sync_dir(self, directory: Path) -> None:
        self.check_power()
        self.step("sync_dir", directory.name)
        for change in self._changes.pop(directory, []):
            _apply(change, self._durable)

    def lock(self, directory: Path) -> DirectoryLock:
        self.check_power()
        if directory in self._locks:
            raise DataDirectoryBusy(f"The data directory {directory} is in use; stop the other process first.")
        self._locks.add(directory)
        return _Held(self._locks, directory)

    def free_bytes(self, directory: Path) -> int:
        self.check_power()
        return max(0, self.capacity - self._used())

    def total_bytes(self, directory: Path) -> int:
        return self.capacity

    def open_limit(self) -> int:
        return 1 << 20

    # For the open files

    def check_power(self) -> None:
        if self._is_off:
            raise OSError(errno.EIO, "the power is off")

    def step(self, operation: Operation, name: str, effect: object = None) -> bool:
        """Count a changing operation, fail it if asked to; True if a sync shall only pretend."""
        for at, (wanted, part, code) in enumerate(self._faults):
            if wanted == operation and part in name:
                del self._faults[at]
                raise OSError(code, os.strerror(code), name)
        self.steps += 1
        if self._cut_in >= 0:
            if self._cut_in == 0:
                if callable(effect) and self._rng.random() < 0.5:
                    effect()  # the platter took it, the process never heard
                self._is_off = True
                self.check_power()
            self._cut_in -= 1
        return operation == "sync" and bool(self._early_receipt) and name.startswith(self._early_receipt)

    def admit(self, name: str, size: int) -> tuple[int, OSError | None]:
        """How many bytes of an append are taken, and the error that ends it."""
        try:
            self.step("append", name)
        except OSError as exc:
            return (self._rng.randint(0, size) if self._is_off or exc.errno == errno.ENOSPC else 0), exc
        room = self.capacity - self._used()
        if size > room:
            return max(0, room), OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)
        return size, None

    def _used(self) -> int:
        return sum(len(content.data) for content in self._names.values())

    def _change(self, *change: tuple[Path, _Content | None]) -> None:
        _apply(change, self._names)
        self._changes.setdefault(change[0][0].parent, []).append(change)


def _apply(change: Change, names: dict[Path, _Content]) -> None:
    for path, content in change:
        if content is None:
            names.pop(path, None)
        else:
            names[path] = content
