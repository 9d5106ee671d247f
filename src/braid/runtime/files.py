"""Files: the one door to the disk for ledgers and journals.

Owns opening, reading, appending, syncing and locking. A test replaces `SystemFiles` by a twin that forgets every byte that
was not synced (`braid.testing.files`). All calls block; callers run them on a `Worker`. SQLite does its own I/O.
"""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path
from typing import Protocol

from braid.errors import DataDirectoryBusy


class File(Protocol):
    """One open file."""

    def append(self, data: bytes) -> int:
        """Write all of `data` at the end; returns the offset it starts at. Not durable until `sync`."""
        ...

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`; shorter only at the end of the file."""
        ...

    def size(self) -> int: ...

    def truncate(self, size: int) -> None: ...

    def sync(self) -> None:
        """Return once data and size are on stable storage."""
        ...

    def close(self) -> None: ...


class DirectoryLock(Protocol):
    """Held while a process owns a data directory."""

    def release(self) -> None: ...


class FileSystem(Protocol):
    """What storage code may do with a disk."""

    def open(self, path: Path, *, create: bool = False) -> File:
        """Open for reading and appending. `create` makes the file; otherwise a missing one is `FileNotFoundError`."""
        ...

    def exists(self, path: Path) -> bool: ...

    def names(self, directory: Path) -> list[str]:
        """Names in a directory, sorted."""
        ...

    def make_dir(self, directory: Path) -> None:
        """Make the directory and its parents, durably; fine if it exists."""
        ...

    def remove(self, path: Path) -> None:
        """Remove a file; fine if it is gone. Durable after `sync_dir`."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename atomically over `target`. Durable after `sync_dir`."""
        ...

    def sync_dir(self, directory: Path) -> None:
        """Make creations, renames and removals in the directory durable."""
        ...

    def lock(self, directory: Path) -> DirectoryLock:
        """Take the directory for this process or raise `DataDirectoryBusy` at once."""
        ...

    def free_bytes(self, directory: Path) -> int:
        """Room left for this process."""
        ...

    def total_bytes(self, directory: Path) -> int:
        """Size of the file system."""
        ...

    def open_limit(self) -> int:
        """How many files and sockets this process may have open."""
        ...


class SystemFile:
    """A file descriptor opened for reading and appending."""

    __slots__ = ("_fd", "_size")

    def __init__(self, path: Path, flags: int) -> None:
        self._fd = os.open(path, flags | os.O_RDWR | os.O_APPEND | os.O_CLOEXEC, 0o644)
        self._size = os.fstat(self._fd).st_size

    def append(self, data: bytes) -> int:
        start = self._size
        written = os.write(self._fd, data)
        self._size += written
        while written < len(data):  # a short write is rare (signals, nearly full disk); finish it
            more = os.write(self._fd, memoryview(data)[written:])
            self._size += more
            written += more
        return start

    def read(self, offset: int, size: int) -> bytes:
        data = os.pread(self._fd, size, offset)
        if len(data) == size or not data:
            return data
        parts = [data]
        got = len(data)
        while got < size and (data := os.pread(self._fd, size - got, offset + got)):
            parts.append(data)
            got += len(data)
        return b"".join(parts)

    def size(self) -> int:
        return self._size

    def truncate(self, size: int) -> None:
        os.ftruncate(self._fd, size)
        self._size = size

    def sync(self) -> None:
        os.fdatasync(self._fd)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SystemLock:
    """An advisory lock on a file in the directory; the kernel drops it when the process ends, however it ends."""

    __slots__ = ("_fd",)

    def __init__(self, directory: Path) -> None:
        self._fd = os.open(directory / "LOCK", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(self._fd)
            raise DataDirectoryBusy(
                f"The data directory {directory} is in use by another process; stop that one or choose another directory."
            ) from exc

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class SystemFiles:
    """The machine's file system."""

    def open(self, path: Path, *, create: bool = False) -> File:
        return SystemFile(path, os.O_CREAT if create else 0)

    def exists(self, path: Path) -> bool:
        return path.exists()

    def names(self, directory: Path) -> list[str]:
        return sorted(path.name for path in directory.iterdir())

    def make_dir(self, directory: Path) -> None:
        missing = []
        path = directory
        while not path.exists():
            missing.append(path)
            path = path.parent
        for path in reversed(missing):
            path.mkdir(exist_ok=True)
            self.sync_dir(path.parent)

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def sync_dir(self, directory: Path) -> None:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def lock(self, directory: Path) -> DirectoryLock:
        return SystemLock(directory)

    def free_bytes(self, directory: Path) -> int:
        stat = os.statvfs(directory)
        return stat.f_bavail * stat.f_frsize

    def total_bytes(self, directory: Path) -> int:
        stat = os.statvfs(directory)
        return stat.f_blocks * stat.f_frsize

    def open_limit(self) -> int:
        return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
