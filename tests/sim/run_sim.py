"""Run seeds of the simulator: `make sim [SEED=n] [WORKLOAD=w] [SEEDS=n] [PLANT=k]`.

Without SEED, each workload runs SEEDS seeds, spread over the machine's processors. A failing seed is printed with its workload,
the command that replays it, the broken promise and the last events. With PLANT, a bug is planted and the run fails unless the
bug is caught. The exit code is 1 if anything failed.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

from tests.sim.planted import PLANTS, planted
from tests.sim.planting import Plant

from braid.testing.sim.history import Event
from braid.testing.sim.limits import SECONDS
from braid.testing.sim.workloads import WORKLOADS, run

DEFAULT_SEEDS = 300
SHOWN_FAILURES = 3


class Result(NamedTuple):
    """One seed, as far as the summary needs it."""

    workload: str
    seed: int
    operations: int
    faults: int
    counts: bool
    virtual_seconds: float
    digest: str
    violations: list[str]
    trace: str
    events: Mapping[str, int]
    """How often what happened, see `what_happened`."""


def run_one(job: tuple[str, int, int | None]) -> Result:
    workload, seed, plant = job
    with planted(plant):
        outcome = run(workload, seed, seconds=SECONDS if plant is None else PLANTS[plant].seconds)
    return Result(
        workload,
        seed,
        outcome.operations,
        outcome.faults,
        outcome.counts,
        outcome.virtual_seconds,
        outcome.digest,
        [str(violation) for violation in outcome.violations],
        outcome.history.trace() if outcome.violations else "",
        what_happened(outcome.history.events),
    )


def what_happened(events: list[Event]) -> Counter[str]:
    """Operations that ended, by name and outcome; faults by name, those at a step also by step and deed; subscriptions that
    arrived while others were at work by kind and position."""
    found: Counter[str] = Counter()
    for event in events:
        if event.op == "fault":
            found[f"fault {event.value[0]}"] += 1
            if event.value[0] in ("txn-step", "plan-step"):
                found[f"{event.value[0]} {event.value[-2]}"] += 1
        elif event.op == "arrive":
            found[f"arrive {event.value[2]} {event.value[3]}"] += 1
        elif event.kind != "invoke":
            found[f"{event.op} {event.kind}"] += 1
    return found


def replay_command(result: Result, plant: int | None) -> str:
    return f"make sim WORKLOAD={result.workload} SEED={result.seed}" + ("" if plant is None else f" PLANT={plant}")


def show(result: Result, plant: int | None, *, with_trace: bool) -> None:
    print(f"\n{result.workload} seed {result.seed} FAILED; replay with: {replay_command(result, plant)}")
    for text in result.violations[:10]:
        print(f"  {text}")
    if len(result.violations) > 10:
        print(f"  ... and {len(result.violations) - 10} more")
    if with_trace:
        print(f"the last events:\n{result.trace}")


def run_many(jobs: list[tuple[str, int, int | None]], processes: int) -> list[Result]:
    """Run the jobs, with a sign of life now and then."""
    results: list[Result] = []
    began = told = time.monotonic()
    with multiprocessing.Pool(processes, maxtasksperchild=50) as pool:
        for result in pool.imap_unordered(run_one, jobs):
            results.append(result)
            if time.monotonic() - told > 5:
                told = time.monotonic()
                failed = sum(1 for each in results if each.violations)
                print(f"  {len(results)} of {len(jobs)} seeds, {failed} failed, {told - began:.0f} s", flush=True)
    return sorted(results, key=lambda result: (result.workload, result.seed))


def summary(results: list[Result], seconds: float) -> None:
    print(f"\n{'workload':10}{'seeds':>8}{'counted':>9}{'failed':>8}{'operations':>12}{'faults':>9}{'virtual h':>11}")
    for workload in sorted({result.workload for result in results}):
        own = [result for result in results if result.workload == workload]
        print(
            f"{workload:10}{len(own):8}{sum(each.counts for each in own):9}{sum(bool(each.violations) for each in own):8}"
            f"{sum(each.operations for each in own):12}{sum(each.faults for each in own):9}"
            f"{sum(each.virtual_seconds for each in own) / 3600:11.1f}"
        )
    print(f"{len(results)} seeds in {seconds:.0f} s: {60 * len(results) / max(seconds, 0.001):.0f} per minute")


def caught_by(bug: Plant, result: Result) -> list[str]:
    """What the checkers say that are meant to catch the bug."""
    return [text for text in result.violations if text.split(":")[0] in bug.checkers]


def catch(plant: int, first: int, seeds: int) -> int:
    """Find the first seed that catches a planted bug."""
    bug = PLANTS[plant]
    for seed in range(first, first + seeds):
        result = run_one((bug.workload, seed, plant))
        if caught := caught_by(bug, result):
            print(f"planted bug {plant} ({bug.title}) caught by {bug.workload} seed {seed}: {caught[0][:300]}")
            return 0
    print(f"planted bug {plant} ({bug.title}) NOT caught by {bug.workload} seeds {first} to {first + seeds - 1}")
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(description="deterministic simulation of whole clusters")
    parser.add_argument("--seed", type=int, help="one seed, with its trace if it fails")
    parser.add_argument("--workload", choices=sorted(WORKLOADS), help="one workload only")
    parser.add_argument("--seeds", type=int, default=DEFAULT_SEEDS, help="seeds per workload")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--plant", type=int, choices=sorted(PLANTS), help="plant this bug; it must be caught")
    parser.add_argument("--plants", action="store_true", help="plant every bug in turn")
    parser.add_argument("--trace", action="store_true", help="with --seed: print the events even if all is well")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    if options.plants:
        return max(catch(number, options.first, options.seeds) for number in PLANTS)
    if options.plant is not None and options.seed is None:
        return catch(options.plant, options.first, options.seeds)
    if options.seed is not None:
        workload = options.workload or (PLANTS[options.plant].workload if options.plant is not None else "W1")
        result = run_one((workload, options.seed, options.plant))
        if result.violations:
            show(result, options.plant, with_trace=True)
            return 1
        if options.trace:
            print(run(workload, options.seed).history.trace(1 << 30))
        print(
            f"{workload} seed {options.seed}: {result.operations} operations, {result.faults} faults, "
            f"{result.virtual_seconds:.0f} virtual seconds, history {result.digest}: all promises kept"
        )
        return 0
    workloads = [options.workload] if options.workload else sorted(WORKLOADS)
    jobs: list[Any] = [
        (workload, seed, None) for workload in workloads for seed in range(options.first, options.first + options.seeds)
    ]
    began = time.monotonic()
    results = run_many(jobs, options.processes)
    failures = [result for result in results if result.violations]
    for at, result in enumerate(failures):
        show(result, None, with_trace=at < SHOWN_FAILURES)
    summary(results, time.monotonic() - began)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
