"""Processes to measure: `braid standalone` and the floor, started, stopped, killed and watched from outside.

Owns the data directories (on the disk of the work tree, never in memory) and how CPU time and memory are read.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[1]
WORK = ROOT / ".work" / "bench"
START_SECONDS = 120.0
KEPT_FREE_BYTES = 20 << 30
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


def cpu_seconds(pid: int) -> float:
    """CPU time of all threads of a process, user and system. In nanoseconds where the kernel keeps them, else in ticks."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):
            return _cpu_ticks(pid)
    return total / 1e9


def _cpu_ticks(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE


def fresh_dir(name: str) -> Path:
    """An empty data directory. Earlier ones stay until the end of the run while there is room: right after thousands of files
    were deleted, ext4 takes up to a millisecond to make one, and that would be measured."""
    WORK.mkdir(parents=True, exist_ok=True)
    if shutil.disk_usage(WORK).free < KEPT_FREE_BYTES:
        for old in WORK.glob(f"{name}-*"):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=WORK))


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def forget_page_cache(path: Path) -> None:
    """Ask the kernel to drop what it keeps of these files, so that the next read is from the disk."""
    for file in path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)


class Process:
    """A server that says `ready ...` on its standard output. `async`-free: the harness only waits."""

    def __init__(self, arguments: list[str], log: Path, environ: Mapping[str, str] | None = None) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self._log = log
        self.started = time.perf_counter()
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, env={**os.environ, **(environ or {})}
            )
        self.pid = self._process.pid
        self.ready_seconds = 0.0
        self.words: list[str] = []

    def __enter__(self) -> Process:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def wait_ready(self) -> Process:
        """Return once the ready line is there; its words are in `words`."""
        stream = self._process.stdout
        if stream is None or not select.select([stream], [], [], START_SECONDS)[0]:
            self.kill()
            raise RuntimeError(f"The process was not ready within {START_SECONDS:.0f} s; see {self._log}.")
        line = stream.readline()
        self.ready_seconds = time.perf_counter() - self.started
        if not line.startswith("ready"):
            self.kill()
            raise RuntimeError(f"The process ended without being ready; see {self._log}.")
        self.words = line.split()
        return self

    @property
    def port(self) -> int:
        """Port of the first broker."""
        return int(self.words[1].split(",")[0].rsplit(":", 1)[1])

    @property
    def http_url(self) -> str:
        """Admin address of the first broker."""
        return self.words[2].split(",")[0]

    def stop(self) -> None:
        """End it cleanly."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End it as a crash would."""
        self._end(signal.SIGKILL)

    def _end(self, number: int) -> None:
        if self._process.poll() is None:
            self._process.send_signal(number)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def start_broker(data_dir: Path, settings: Mapping[str, str] | None = None, port: int = 0, brokers: int = 1) -> Process:
    """A durable broker with its defaults, except for `settings` (environment variables); or several in one process."""
    arguments = [str(Path(sys.executable).parent / "braid"), "standalone", "--data-dir", str(data_dir), "--port", str(port)]
    arguments += ["--http-port", "0", "--host", "127.0.0.1", "--log-level", "warning"]
    if brokers > 1:
        arguments += ["--brokers", str(brokers)]
    return Process(arguments, WORK / "broker.log", settings)


def start_floor(data_dir: Path) -> Process:
    return Process([sys.executable, "-m", "bench.floor", str(data_dir)], WORK / "floor.log").wait_ready()
