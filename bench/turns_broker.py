"""A broker process that measures the turns of its own event loop, for `bench/scenarios/turns.py`.

    python bench/turns_broker.py DATA_DIR SLOW_MS

Says `ready URL URL` like `braid standalone`. A line on standard input begins a new measurement and is answered by a line with
what the last one saw: the longest turn in seconds, the most CPU time that one took (others on the machine disturb it less),
the innermost places it stood in, and how many turns were so long that the watchdog of a broker process would have logged them.
Uses only what a broker is built from, so that the same file measures older commits. With SLOW_MS every job of a disk takes so
much longer.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import uvloop

from braid.broker.config import BrokerConfig
from braid.cli.standalone import GC_THRESHOLDS, raise_open_file_limit
from braid.runtime.env import Runtime
from braid.runtime.threads import SystemThreads
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.standalone import Standalone

PERIOD = 0.002
LOOK_SECONDS = 0.01
LONG_SECONDS = 0.03
"""From here on it is noted where the loop stands."""
STALL_SECONDS = 1.0
"""The default of `broker.loop_stall_ms`."""
PLACES = 4


class Turns:
    """A timer on the loop, and a thread that looks where the loop stands while the timer is late."""

    def __init__(self) -> None:
        self._beat = time.perf_counter()
        self._longest = 0.0
        self._longest_cpu = 0.0
        self._stalls = 0
        self._cpu = time.thread_time()
        self._now: Counter[str] = Counter()
        self._places: Counter[str] = Counter()
        self._loop = asyncio.get_running_loop()
        self._loop.call_later(PERIOD, self._turned)
        threading.Thread(target=self._look, args=(threading.get_ident(),), daemon=True).start()

    def take(self) -> dict[str, Any]:
        """What was seen, and begin anew."""
        places = [place for place, _count in self._places.most_common(PLACES)]
        found = {"longest": self._longest, "cpu": self._longest_cpu, "places": places, "stalls": self._stalls}
        self._longest, self._longest_cpu, self._stalls, self._places, self._now = 0.0, 0.0, 0, Counter(), Counter()
        self._beat, self._cpu = time.perf_counter(), time.thread_time()
        return found

    def _turned(self) -> None:
        now = time.perf_counter()
        if (seconds := now - self._beat - PERIOD) > self._longest:
            self._longest, self._places = seconds, self._now
        self._stalls += seconds >= STALL_SECONDS
        self._beat, self._now = now, Counter()
        cpu, self._cpu = self._cpu, time.thread_time()
        self._longest_cpu = max(self._longest_cpu, self._cpu - cpu)
        self._loop.call_later(PERIOD, self._turned)

    def _look(self, watched: int) -> None:
        while True:
            time.sleep(LOOK_SECONDS)
            if time.perf_counter() - self._beat > LONG_SECONDS:
                frame = sys._current_frames().get(watched)
                for each in traceback.extract_stack(frame)[-6:]:
                    self._now[f"{Path(each.filename).stem}.{each.name}:{each.lineno}"] += 1


class SlowThreads(SystemThreads):
    """Jobs take longer, as with a disk that is busy."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def worker(self, name: str) -> Any:
        worker: Any = super().worker(name)
        post, run, seconds = worker.post, worker.run, self._seconds

        def slowly(job: Any) -> Any:
            def work() -> Any:
                time.sleep(seconds)
                return job()

            return work

        worker.post = lambda job, done: post(slowly(job), done)
        worker.run = lambda job: run(slowly(job))
        return worker


async def main(data_dir: str, slow_ms: float) -> None:
    config = StandaloneConfig(
        broker=BrokerConfig(port=0, http_port=0, retention_minutes=-1, retention_mb=-1, retention_check_seconds=5),
        storage=StorageConfig(data_dir=data_dir),
    )
    runtime = Runtime(threads=SlowThreads(slow_ms / 1000)) if slow_ms else Runtime()
    async with Standalone(config, runtime) as broker:
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        turns = Turns()
        print(broker.ready_line, flush=True)
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(turns.take()), flush=True)


if __name__ == "__main__":
    raise_open_file_limit()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(sys.argv[1], float(sys.argv[2])))
