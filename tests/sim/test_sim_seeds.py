"""Fixed seeds of every workload, and planted bugs that must be caught. `make sim` runs more."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.pool import Pool

import pytest
from tests.sim.planted import PLANTS, planted
from tests.sim.run_sim import Result, caught_by, replay_command, run_one

from braid.testing.sim.workloads import WORKLOADS, run

SEEDS = 16
"""Of each workload; `make sim` runs more."""
AWAITED = {"W11"}
"""Workloads that fail now and then until brokers notice that a log they serve was claimed by another one."""
EXERCISED: dict[str, dict[str, int]] = {
    "W11": {
        **{f"fault {name}": 1 for name in ("kill", "pause", "abort-open", "second-owner", "txn-step")},
        **{f"txn-step {deed}": 1 for deed in ("kill", "pause", "abort", "freeze", "replace")},
        "split ok": 40,
        "merge ok": 20,
        "commit ok": 100,
    },
    "W12": {"seek-to ok": 30, "clear-backlog ok": 5, "commit ok": 100, "abort ok": 20, "plan-step hold": 10},
    "W13": {
        **{f"arrive {kind} {position}": 4 for kind in ("stream", "queue") for position in ("earliest", "latest")},
        "plan-step hold": 20,
        "plan-step kill": 4,
    },
    "W15": {"topic-gone info": 50, "rest info": 200, "restore fail": 5, "restore ok": 50, "split ok": 4},
}
"""What a workload is for must have happened in its fixed seeds, together so often at least."""
TRIES = 40
"""Seeds tried after the recorded one: a change of the product changes what happens in a seed."""
PROCESSES = 2


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield pool


@pytest.mark.inv("INV1", "INV2", "INV3", "INV4", "INV5", "INV6", "INV7", "INV8")
@pytest.mark.inv("INV9", "INV10", "INV11", "INV12", "INV13", "INV14", "INV15")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", sorted(WORKLOADS.keys() - AWAITED))
def test_every_promise_is_kept(workload: str, pool: Pool) -> None:
    results = pool.map(run_one, [(workload, seed, None) for seed in range(SEEDS)], chunksize=2)
    failed = [result for result in results if result.violations]
    assert not failed, "\n".join(f"{replay_command(each, None)}: {each.violations[:3]}" for each in failed)
    idle = [(result.seed, result.operations, result.faults) for result in results if not result.counts]
    assert not idle, f"too little happened in these seeds (seed, operations, faults): {idle}"
    happened = sum((Counter(result.events) for result in results), Counter[str]())
    rare = {what: happened[what] for what, often in EXERCISED.get(workload, {}).items() if happened[what] < often}
    assert not rare, f"{workload} does not do what it is for: {rare}"


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_a_seed_gives_the_same_history_every_time(workload: str) -> None:
    once, again, other = run(workload, 5), run(workload, 5), run(workload, 6)
    assert once.history.lines() == again.history.lines()
    assert once.history.lines() != other.history.lines()
    assert len(once.history.events) > 100


def test_a_seed_gives_the_same_history_in_another_process() -> None:
    """Nothing depends on hashes of strings or on addresses in memory."""
    program = "from braid.testing.sim.workloads import run; print(*(run(each, 3).digest for each in ('W2', 'W4', 'W9')))"
    digests = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": salt},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert len(digests) == 1


def first_that_catches(number: int) -> tuple[int, Result | None]:
    """The recorded seed of a planted bug or the first other one that catches it."""
    bug = PLANTS[number]
    for seed in (bug.seed, *range(TRIES)):
        result = run_one((bug.workload, seed, number))
        if caught_by(bug, result):
            return number, result
    return number, None


@pytest.mark.timeout(900)  # more than thirty bugs, some need several seeds; machines are shared
def test_every_planted_bug_is_caught(pool: Pool, capsys: pytest.CaptureFixture[str]) -> None:
    results = dict(pool.map(first_that_catches, sorted(PLANTS), chunksize=1))
    with capsys.disabled():
        for number, result in results.items():
            where = "NOT caught" if result is None else f"caught by {result.workload} seed {result.seed}"
            print(f"\nplanted bug {number} ({PLANTS[number].title}): {where}", end="")
    missed = [number for number, result in results.items() if result is None]
    assert not missed, f"planted bugs that no seed catches: {missed}"


def test_nothing_stays_planted() -> None:
    for number, bug in PLANTS.items():
        patches = bug.apply()
        before = [owner.__dict__.get(name) for owner, name, _replacement in patches]
        with planted(number):
            assert all(owner.__dict__[name] is not old for (owner, name, _), old in zip(patches, before, strict=True))
        assert all(owner.__dict__.get(name) is old for (owner, name, _), old in zip(patches, before, strict=True))
