"""Spark's Python processes, forked from one that has imported what they need.

Spark starts a Python process for every stream that is planned and for every kind of work of every JVM, and each imports
PySpark, pyarrow and the connector: most of what a short query costs. With a `ForkServer` such a process, as soon as Python is
up, hands its files, its environment and its arguments to a server that has all of it imported, and a child of the server goes
on. What runs is the same. That it also comes up by itself is shown by the test of `braid pipeline run`, which has no server.

This file is also the server's program.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from fork_client import ADDRESS, FILES, LENGTH_BYTES

IMPORTS = (
    "pyspark.worker",
    "pyspark.sql.worker.create_data_source",
    "pyspark.sql.worker.lookup_data_sources",
    "pyspark.sql.worker.plan_data_source_read",
    "pyspark.sql.worker.python_streaming_sink_runner",
    "pyspark.sql.worker.write_into_data_source",
    "pyspark_braid",
    "braid_spark.reader",
    "braid_spark.sink",
    "braid_spark.stream_reader",
    "braid_spark.stream_writer",
    "concurrent.futures.thread",
    "encodings.idna",
    "pandas",  # by pyarrow, as soon as it makes an array or a scalar of a Python value
)
BACKLOG = 64


class ForkServer:
    """The server, for as long as the block lasts. `environment` is what processes need to find it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="braid-fork-")  # a short name: that of a socket must be
        address = str(Path(self._folder.name) / "socket")
        self.environment = {ADDRESS: address}
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(address)
            listening.listen(BACKLOG)  # from now on: who comes before the server is up waits for it
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(listening.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[listening.fileno()],
                env={**os.environ, "PYTHONHASHSEED": "0"},  # as Spark sets it for its workers
            )

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._folder.cleanup()


def serve(listening: socket.socket) -> None:
    """Fork a child for each who asks, until standard input ends."""
    for name in IMPORTS:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection in a child must not write to, and so copy, all that is there
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for children here
    while True:
        ready = select.select([sys.stdin.fileno(), listening.fileno()], [], [])[0]
        if sys.stdin.fileno() in ready:
            return
        asking = listening.accept()[0]
        if os.fork() == 0:
            listening.close()
            go_on_as(asking)
        asking.close()


def go_on_as(asking: socket.socket) -> NoReturn:
    """Be the process that asks."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        what = received(asking)
        end_with(asking)
        os.environ.clear()
        os.environ.update(what["environment"])
        os.chdir(what["folder"])
        words: list[str] = what["arguments"]
        sys.orig_argv, sys.argv = words, words[words.index("-m") + 1 :]
        sys.path[:] = [what["folder"], *what["path"]]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - there is nobody above
        sys.excepthook(*sys.exc_info())
    try:
        sys.stdout.flush()
        sys.stderr.flush()
        asking.sendall(bytes([code & 0xFF]))
    finally:
        os._exit(code & 0xFF)


def received(asking: socket.socket) -> dict[str, Any]:
    """What a process says of itself; its standard files become this one's."""
    head, files, _flags, _address = socket.recv_fds(asking, LENGTH_BYTES, len(FILES))
    for given, own in zip(files, FILES, strict=True):
        os.dup2(given, own)
        os.close(given)
    text = asking.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    found: dict[str, Any] = json.loads(text)
    return found


def end_with(asking: socket.socket) -> None:
    """When the other process ends, this one gets the signal with which Spark ends what it started."""
    fcntl.fcntl(asking, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(asking, fcntl.F_SETSIG, signal.SIGTERM)
    fcntl.fcntl(asking, fcntl.F_SETFL, fcntl.fcntl(asking, fcntl.F_GETFL) | os.O_ASYNC)
    os.register_at_fork(after_in_child=asking.close)  # its workers do not stand for it


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
