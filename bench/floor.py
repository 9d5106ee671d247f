"""The floor: what the machine costs without Braid, as a bare uvloop program that takes part in the same run.

    python -m bench.floor DIRECTORY

A connection begins with one line of JSON that says what it measures. `publish`: bytes come in, are gathered, appended to a file
and synced with `fdatasync` by one thread (the next group starts when the last one ends, as in Braid), then a receipt per entry
goes back; nothing is parsed, an entry is so many bytes. `deliver`: MESSAGE frames go out from memory, acknowledgments are read
and thrown away.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from pathlib import Path
from queue import SimpleQueue
from typing import cast

import msgspec
import uvloop
from bench.shapes import Shape

from braid.wire.encode import message_header, send_receipt

RECEIPT = send_receipt(1, 100_000, None, 1000, 100_000)
CHUNK_BYTES = 256 << 10


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """First line of a connection."""

    mode: str
    shape: Shape
    frame_bytes: int = 0
    entries: int = 0


class Log:
    """One file, one thread, one group at a time."""

    def __init__(self, path: Path) -> None:
        self._loop = asyncio.get_running_loop()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._pending: list[tuple[Floor, bytes]] = []
        self._is_busy = False
        self._groups: SimpleQueue[list[tuple[Floor, bytes]]] = SimpleQueue()
        threading.Thread(target=self._work, daemon=True).start()

    def append(self, owner: Floor, data: bytes) -> None:
        self._pending.append((owner, data))
        if not self._is_busy:
            self._is_busy = True
            self._loop.call_soon(self._next)

    def _next(self) -> None:
        group, self._pending = self._pending, []
        self._is_busy = bool(group)
        if group:
            self._groups.put(group)

    def _work(self) -> None:
        while True:
            group = self._groups.get()
            data = memoryview(b"".join([data for _, data in group]))
            while data:
                data = data[os.write(self._fd, data) :]
            os.fdatasync(self._fd)
            self._loop.call_soon_threadsafe(self._synced, group)

    def _synced(self, group: list[tuple[Floor, bytes]]) -> None:
        self._next()
        sums: dict[Floor, int] = {}
        for owner, data in group:
            sums[owner] = sums.get(owner, 0) + len(data)
        for owner, size in sums.items():
            owner.synced(size)


class Floor(asyncio.Protocol):
    """One connection."""

    _transport: asyncio.Transport

    def __init__(self, log: Log) -> None:
        self._log = log
        self._wanted: Wanted | None = None
        self._line = b""
        self._rest = 0
        self._left = 0
        self._chunk = b""
        self._each = 0
        self._is_open = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def data_received(self, data: bytes) -> None:
        if self._wanted is None:
            self._line += data
            if b"\n" not in self._line:
                return
            line, data = self._line.split(b"\n", 1)
            self._wanted = msgspec.json.decode(line, type=Wanted)
            if self._wanted.mode == "deliver":
                self._start_delivery(self._wanted)
        if data and self._wanted.mode == "publish":
            self._log.append(self, data)

    def synced(self, size: int) -> None:
        assert self._wanted is not None
        whole, self._rest = divmod(self._rest + size, self._wanted.frame_bytes)
        if whole:
            self._transport.write(RECEIPT * whole)

    def _start_delivery(self, wanted: Wanted) -> None:
        entry = wanted.shape.entry()
        frame = message_header(1, 1000, 100_000, -1, 0, (), None, len(entry)) + entry
        self._each = max(1, min(100, CHUNK_BYTES // len(frame)))
        self._chunk = frame * self._each
        self._left = wanted.entries
        self._push()

    def _push(self) -> None:
        while self._left and self._is_open:
            count = min(self._left, self._each)
            self._left -= count
            self._transport.write(self._chunk[: count * (len(self._chunk) // self._each)])

    def pause_writing(self) -> None:
        self._is_open = False

    def resume_writing(self) -> None:
        self._is_open = True
        self._push()


async def main(directory: Path) -> None:
    loop = asyncio.get_running_loop()
    log = Log(directory / "floor.log")
    server = await loop.create_server(lambda: Floor(log), "127.0.0.1", 0)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    gc.freeze()
    print(f"ready 127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await stop.wait()


if __name__ == "__main__":
    uvloop.run(main(Path(sys.argv[1])))
