"""Fresh random seeds of every workload, for hours: `make sim-long [SEEDS=n] [MINUTES=n] [JOBS=n] [WORKLOAD=w]`.

Seeds come from the operating system, workloads take turns. A failing seed is printed at once and appended to the file of
failures with the commit it failed on; what was run is appended to a ledger, one line for each part of a run, so that a run may
be stopped and gone on with at any time: SEEDS is how many there shall be of this commit, those of earlier parts included, and
`--summary` adds all parts up. A seed counts only with enough operations and faults; one that takes too long fails
(`run_sim.run_one` has the limits). The exit code is 1 if anything failed in this part.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import secrets
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from tests.sim.run_sim import Result, replay_command, run_one

from braid.testing.sim.workloads import WORKLOADS

Job = tuple[str, int, int | None]
HOME = Path(".work")
FAILURES = "sim-failures.txt"
LEDGER = "sim-ledger.jsonl"
HIGHEST_SEED = 1 << 31
JOBS = 2
AHEAD = 2
"""Jobs that wait for each process."""
PART_SECONDS = 60.0
"""A line of the ledger is written about as often, so that a run that is killed loses little."""


class Part(msgspec.Struct, omit_defaults=True):
    """A line of the ledger: what one workload did for a while."""

    commit: str
    workload: str
    seeds: list[int]
    counted: int = 0
    failed: list[int] = []
    operations: int = 0
    faults: int = 0
    virtual_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def add(self, result: Result, cpu_seconds: float) -> None:
        self.seeds.append(result.seed)
        self.counted += result.counts
        self.operations += result.operations
        self.faults += result.faults
        self.virtual_seconds += result.virtual_seconds
        self.cpu_seconds = round(self.cpu_seconds + cpu_seconds, 3)
        if result.violations:
            self.failed.append(result.seed)


class Records:
    """The two files of a run."""

    def __init__(self, home: Path, commit: str) -> None:
        self.failures = home / FAILURES
        self.ledger = home / LEDGER
        self._commit = commit
        self._parts: dict[str, Part] = {}
        self._saved = time.monotonic()
        home.mkdir(exist_ok=True, parents=True)

    def note(self, result: Result, cpu_seconds: float) -> None:
        """One seed has ended."""
        part = self._parts.setdefault(result.workload, Part(self._commit, result.workload, []))
        part.add(result, cpu_seconds)
        if result.violations:
            with self.failures.open("a") as file:
                file.write(f"{result.workload}\t{result.seed}\t{self._commit}\t{one_line(result.violations[0])}\n")
        if time.monotonic() - self._saved > PART_SECONDS:
            self.save()

    def save(self) -> None:
        with self.ledger.open("ab") as file:
            for part in self._parts.values():
                file.write(msgspec.json.encode(part) + b"\n")
        self._parts = {}
        self._saved = time.monotonic()

    def parts(self) -> list[Part]:
        """Of all runs so far."""
        if not self.ledger.exists():
            return []
        return [msgspec.json.decode(line, type=Part) for line in self.ledger.read_bytes().splitlines()]


def one_line(text: str) -> str:
    return " ".join(text.split())[:500]


def timed(job: Job) -> tuple[Result, float]:
    """One seed and the CPU time it took."""
    began = time.process_time()
    result = run_one(job)
    return result, time.process_time() - began


def fresh(workloads: list[str]) -> Iterator[Job]:
    """Workloads in turn, each time with a seed that nobody knows."""
    for workload in itertools.cycle(workloads):
        yield workload, secrets.randbelow(HIGHEST_SEED), None


def head() -> str:
    """The commit, with a sign if something is changed in the tree."""
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "unknown"


def run(jobs: Iterable[Job], records: Records, *, processes: int, seconds: float | None, wanted: str = "") -> int:
    """Run seeds until there are no more or time is over; returns how many failed. `wanted` tells how many there shall be."""
    began = told = time.monotonic()
    done = failed = 0
    room = threading.Semaphore(AHEAD * processes)
    with multiprocessing.Pool(processes, maxtasksperchild=50) as pool:
        try:
            for result, cpu_seconds in pool.imap_unordered(timed, _in_time(jobs, room, began, seconds)):
                room.release()
                done += 1
                records.note(result, cpu_seconds)
                if result.violations:
                    failed += 1
                    print(f"FAILED {replay_command(result, None)}: {one_line(result.violations[0])}", flush=True)
                if time.monotonic() - told > PART_SECONDS / 2:
                    told = time.monotonic()
                    print(f"  {done}{wanted} seeds, {failed} failed, {told - began:.0f} s", flush=True)
        except KeyboardInterrupt:
            print("stopped; what was run is in the ledger")
        finally:
            records.save()
    return failed


def _in_time(jobs: Iterable[Job], room: threading.Semaphore, began: float, seconds: float | None) -> Iterator[Job]:
    """Jobs for as long as there is time. The pool would take all of them at once: it is given a few ahead of those that end."""
    for job in jobs:
        room.acquire()
        if seconds is not None and time.monotonic() - began > seconds:
            return
        yield job


def summary(parts: list[Part]) -> None:
    """What all parts come to."""
    commits = Counter(part.commit for part in parts)
    print(f"{'workload':10}{'seeds':>8}{'counted':>9}{'failed':>8}{'operations':>12}{'faults':>9}{'virtual h':>11}{'CPU s':>9}")
    for workload in [*sorted({part.workload for part in parts}), "all"]:
        own = [part for part in parts if workload in ("all", part.workload)]
        print(
            f"{workload:10}{sum(len(each.seeds) for each in own):8}{sum(each.counted for each in own):9}"
            f"{sum(len(each.failed) for each in own):8}{sum(each.operations for each in own):12}"
            f"{sum(each.faults for each in own):9}{sum(each.virtual_seconds for each in own) / 3600:11.1f}"
            f"{sum(each.cpu_seconds for each in own):9.0f}"
        )
    seeds = [seed for part in parts for seed in part.seeds]
    print(
        f"seeds drawn from 0 to {HIGHEST_SEED - 1}; the lowest was {min(seeds, default=0)}, the highest {max(seeds, default=0)}"
    )
    print("commits: " + ", ".join(commits))
    for part in parts:
        for seed in part.failed:
            print(f"failed: {part.workload} {seed} on {part.commit}")


def main() -> int:
    parser = argparse.ArgumentParser(description="fresh random seeds of the simulator")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), action="append", help="only these, in turn")
    parser.add_argument(
        "--seeds", type=int, help="how many of this commit, earlier parts included (else 20 of each, or --minutes)"
    )
    parser.add_argument("--minutes", type=float, help="begin no seed after so long")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes")
    parser.add_argument("--home", type=Path, default=HOME, help="where failures and the ledger are kept")
    parser.add_argument("--summary", action="store_true", help="only add up the parts that were run so far")
    options = parser.parse_args()
    commit = head()
    records = Records(options.home, commit)
    failed = 0
    if not options.summary:
        workloads = options.workload or sorted(WORKLOADS)
        seeds = left = options.seeds
        if seeds is not None:
            before = sum(len(part.seeds) for part in records.parts() if part.commit == commit and part.workload in workloads)
            left = max(0, seeds - before)
            print(f"{before} of {seeds} seeds of {commit} were run before, {left} are left ({records.ledger})", flush=True)
        elif options.minutes is None:
            left = 20 * len(workloads)
        jobs = itertools.islice(fresh(workloads), left)
        seconds = None if options.minutes is None else 60 * options.minutes
        failed = run(jobs, records, processes=options.jobs, seconds=seconds, wanted="" if left is None else f" of {left}")
    summary(records.parts())
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
