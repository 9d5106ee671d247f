"""A Python process that Spark has started lets a child of the test's fork server go on in its stead, see `fork_server`.

Imports next to nothing: that is what it is for.
"""

from __future__ import annotations

import json
import os
import socket
import sys

ADDRESS = "BRAID_FORK_SERVER"
"""In the environment: where the server listens."""
JVM = "BRAID_FORK_JVM"
"""In the environment of a child of the server: the JVM it works for, which is not its parent."""
MODULES = (
    "pyspark.daemon",
    "pyspark.sql.streaming.python_streaming_source_runner",
    "pyspark.sql.streaming.transform_with_state_driver_worker",
)
"""What Spark starts with `python -m`."""
FILES = (0, 1, 2)
LENGTH_BYTES = 4
LOST = 70
"""Exit code of a process whose child was killed."""


def is_of_spark() -> bool:
    """Whether this process is one that can be handed over."""
    return any(each == "-m" and name in MODULES for each, name in zip(sys.orig_argv, sys.orig_argv[1:], strict=False))


def hand_over() -> None:
    """Let a child of the server be this process, and end as it does; ended before, it takes the child along. Returns if there
    is no server."""
    address = os.environ.get(ADDRESS)
    if address is None:
        return
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:  # the test that had one is over
        server.close()
        return
    environment = {**os.environ, JVM: str(os.getppid())}
    folder = os.getcwd()  # noqa: PTH109 - pathlib takes longer than all else here
    what = {"arguments": sys.orig_argv, "environment": environment, "folder": folder, "path": sys.path}
    text = json.dumps(what).encode()
    socket.send_fds(server, [len(text).to_bytes(LENGTH_BYTES, "big")], FILES)
    server.sendall(text)
    code = server.recv(1)
    os._exit(code[0] if code else LOST)
