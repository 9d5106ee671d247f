"""Producers that keep trying on a file system that is nearly full, emptied a little and filled again: memory, log, answers.

Mounts a tmpfs (needs to be root), starts `braid standalone` on it and lets producers send messages of 1 MB without end. Every
`--turn` seconds a ballast of 20 MB comes or goes, every third turn a topic is deleted. One line per `--sample` seconds: memory,
lines in the broker's log, messages stored and refused, changes of `braid_storage_writable`. Ends with 1 if the memory
passes `--rss` or the log has more lines than a line per change and minute.

    python -m tests.e2e.full_disk_loop --seconds 600
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from pathlib import Path

import braid
from braid.errors import BraidError

MESSAGE = os.urandom(1_000_000)
BALLAST = bytes(20 << 20)
TOPICS = [f"persistent://public/default/full-{number}" for number in range(3)]


class Watched:
    """A broker process on the small disk, its log and what was seen of it."""

    def __init__(self, disk: Path) -> None:
        self.disk = disk
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        command = [sys.executable, "-m", "braid.cli.main", "standalone", "--port", "0", "--http-port", "0"]
        self.process = subprocess.Popen(
            [*command, "--data-dir", str(disk / "data")], stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready "), line
        self.url, self.http_url = line.split()[1:3]
        self.counts: Counter[str] = Counter()
        self.writable = 1.0

    def call(self, path: str, method: str = "GET") -> str:
        try:
            with urllib.request.urlopen(urllib.request.Request(self.http_url + path, method=method), timeout=10) as answer:
                return str(answer.read(), "utf-8")
        except (urllib.error.URLError, TimeoutError) as error:
            self.counts[f"{method} refused"] += 1
            return str(error)

    def look(self) -> None:
        """Note whether the storage takes writes."""
        for line in self.call("/metrics").splitlines():
            if line.startswith("braid_storage_writable"):
                now = float(line.split()[-1])
                self.counts["changes"] += now != self.writable
                self.writable = now

    def rss_mb(self) -> float:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024

    def log_lines(self) -> list[str]:
        self._log.flush()
        return Path(f"/proc/self/fd/{self._log.fileno()}").read_text().splitlines()

    def turn(self, number: int) -> None:
        """Free or take some space from outside; now and then delete a topic."""
        ballast = self.disk / "ballast"
        if number % 3 == 2:
            name = TOPICS[number // 3 % len(TOPICS)].rpartition("/")[2]
            self.call(f"/admin/v2/persistent/public/default/{name}?force=true", "DELETE")
        if ballast.exists():
            ballast.unlink()
            return
        try:
            ballast.write_bytes(BALLAST)
        except OSError:
            ballast.unlink(missing_ok=True)


async def produce(watched: Watched, topic: str) -> None:
    """Ten messages at a time, without end; a new producer after each error, as a restarted application has."""
    while True:
        try:
            async with braid.connect(watched.url) as client, client.producer(topic) as producer:
                while True:
                    results = await asyncio.gather(*[producer.send(MESSAGE) for _ in range(10)], return_exceptions=True)
                    for result in results:
                        watched.counts[type(result).__name__ if isinstance(result, Exception) else "stored"] += 1
                    await asyncio.sleep(0.2)
        except BraidError as error:
            watched.counts[f"{type(error).__name__} when attaching"] += 1
            await asyncio.sleep(0.2)


async def run(options: argparse.Namespace, disk: Path) -> int:
    (disk / "ballast").write_bytes(BALLAST)
    watched = Watched(disk)
    tasks = [asyncio.create_task(produce(watched, topic)) for topic in TOPICS]
    began, turns, samples, highest = time.monotonic(), 0, 0, 0.0
    try:
        while (passed := time.monotonic() - began) < options.seconds and watched.process.poll() is None:
            await asyncio.to_thread(watched.look)
            if passed >= (turns + 1) * options.turn:
                await asyncio.to_thread(watched.turn, turns)
                turns += 1
            if passed >= samples * options.sample:
                samples += 1
                highest = max(highest, watched.rss_mb())
                counts = ", ".join(f"{name} {count}" for name, count in sorted(watched.counts.items()))
                print(f"{passed:5.0f} s  {watched.rss_mb():7.1f} MB  {len(watched.log_lines()):6} lines  {counts}", flush=True)
            await asyncio.sleep(0.25)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        is_alive = watched.process.poll() is None
        if is_alive:
            watched.process.send_signal(signal.SIGKILL)
        watched.process.wait(30)
    lines = watched.log_lines()
    kinds = Counter(" ".join(line.split()[2:9]) for line in lines)
    for kind, count in kinds.most_common(8):
        print(f"{count:7}  {kind}")
    allowed = watched.counts["changes"] + 2 * turns + options.seconds / 60 + 10
    print(f"highest {highest:.0f} MB, {len(lines)} lines ({allowed:.0f} allowed), {turns} turns of the space")
    return int(not is_alive or highest > options.rss or len(lines) > allowed or not watched.counts["stored"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--megabytes", type=int, default=110, help="size of the file system")
    parser.add_argument("--turn", type=float, default=10, help="seconds between two changes of the free space")
    parser.add_argument("--sample", type=float, default=10, help="seconds between two lines")
    parser.add_argument("--rss", type=float, default=350, help="most resident memory of the broker, in MB")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={options.megabytes}m", "tmpfs", folder], check=True)
        try:
            return asyncio.run(run(options, Path(folder)))
        finally:
            subprocess.run(["umount", folder], check=True)


if __name__ == "__main__":
    sys.exit(main())
