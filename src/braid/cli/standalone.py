"""`braid standalone`: the process around a `Standalone` broker.

Owns what belongs to the process: settings, logs, event loop, open-file limit, garbage collector, signals, the ready line, the
exit code. A fatal storage error ends the process at once, without any clean-up that could pretend otherwise.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import uvloop

from braid.cli.output import OutputFailed, emit
from braid.runtime import config as settings
from braid.runtime import logs
from braid.runtime.env import Runtime
from braid.runtime.loop_watch import LoopWatch
from braid.web.config import StandaloneConfig
from braid.web.standalone import Standalone

log = logging.getLogger(__name__)
EXIT_STORAGE = 1
GC_THRESHOLDS = (50_000, 50, 1000)


def run(file: Path | None, flags: Mapping[str, Mapping[str, Any]]) -> None:
    """Serve until a signal comes."""
    config = settings.load(StandaloneConfig, file, os.environ, flags)
    logs.setup(config.log.settings)
    raise_open_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config))


async def _serve(config: StandaloneConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored means: started by nohup
            loop.add_signal_handler(number, stop.set)
    runtime = Runtime()
    async with Standalone(config, runtime, on_fatal=_die) as broker:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        _say_ready(broker.ready_line)
        with LoopWatch(runtime.turns, config.broker.loop_stall_ms / 1000):
            await stop.wait()


def _say_ready(line: str) -> None:
    """The broker serves whether or not somebody reads the line."""
    try:
        emit(f"{line}\n".encode())
    except (OutputFailed, BrokenPipeError) as error:
        log.warning("%s (standard output does not take this line: %s)", line, error)


def _die(error: BaseException) -> None:
    sys.stderr.write(f"error: storage failed, the process ends: {error}\n")
    sys.stderr.flush()
    os._exit(EXIT_STORAGE)


def raise_open_file_limit() -> None:
    """As many open files as the system lets us have: one per connection and cached ledger file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
