"""Fixed seeds of every workload, and planted bugs that must be caught. `make sim` runs more."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from multiprocessing.pool import Pool
from pathlib import Path

import pytest
from tests.sim.planted import PLANTS, planted
from tests.sim.planted_repairs import CAUGHT_BY_TESTS
from tests.sim.run_sim import Result, caught_by, replay_command, run_one

from braid.testing.sim.run import run_seed
from braid.testing.sim.transactions import Bank
from braid.testing.sim.workloads import WORKLOADS, run

SEEDS = 10
"""Of each workload; `make sim` runs more."""
FIRST = {"W11": 10}
"""Where the fixed seeds of a workload begin, if not with 0: none of the first ten of W11 draws the fault `abort-open`."""
FOUND = (
    ("W4", 5182148),
    ("W5", 8295856),
    ("FastBank", 40157),
    ("FastBank", 40483),
    ("W14", 491296364),
    ("W15", 1652662388),
    ("W13", 442612882),
)
"""Seeds that failed once. What happens in them has changed since; what they found has tests of its own."""
EXERCISED: dict[str, dict[str, int]] = {
    "W11": {
        **{f"fault {name}": 1 for name in ("kill", "pause", "abort-open", "second-owner", "txn-step")},
        **{f"txn-step {deed}": 1 for deed in ("kill", "abort", "freeze", "replace")},
        "split ok": 25,
        "merge ok": 12,
        "commit ok": 60,
    },
    "W12": {"seek-to ok": 12, "clear-backlog ok": 3, "commit ok": 60, "abort ok": 12, "plan-step hold": 6},
    "W13": {
        **{f"arrive {kind} {position}": 1 for kind in ("stream", "queue") for position in ("earliest", "latest")},
        "plan-step hold": 12,
        "plan-step kill": 2,
    },
    "W14": {"join ok": 100, "leave ok": 60, "unregistered info": 60, "crash info": 1, "split ok": 20},
    "W15": {"topic-gone info": 30, "rest info": 120, "restore fail": 3, "restore ok": 30, "split ok": 2},
}
"""What a workload is for must have happened in its fixed seeds, together so often at least."""
TRIES = 40
"""Seeds tried after the recorded one: a change of the product changes what happens in a seed."""
PROCESSES = 2
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield pool


@pytest.mark.inv("INV1", "INV2", "INV3", "INV4", "INV5", "INV6", "INV7", "INV8")
@pytest.mark.inv("INV9", "INV10", "INV11", "INV12", "INV13", "INV14", "INV15")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_every_promise_is_kept(workload: str, pool: Pool) -> None:
    results = pool.map(run_one, [(workload, FIRST.get(workload, 0) + seed, None) for seed in range(SEEDS)], chunksize=2)
    failed = [result for result in results if result.violations]
    assert not failed, "\n".join(f"{replay_command(each, None)}: {each.violations[:3]}" for each in failed)
    idle = [(result.seed, result.operations, result.faults) for result in results if not result.counts]
    assert not idle, f"too little happened in these seeds (seed, operations, faults): {idle}"
    happened = sum((Counter(result.events) for result in results), Counter[str]())
    rare = {what: happened[what] for what, often in EXERCISED.get(workload, {}).items() if happened[what] < often}
    assert not rare, f"{workload} does not do what it is for: {rare}"


class FastBank(Bank):
    """The bank as it was when its seeds were found."""

    churn_pace = (0.3, 0.5, 0.8)


def again(job: tuple[str, int]) -> list[str]:
    workload, seed = job
    outcome = run_seed("FB", seed, FastBank) if workload == "FastBank" else run(workload, seed)
    return [f"{workload} {seed}: {violation}" for violation in outcome.violations]


@pytest.mark.timeout(300)
def test_seeds_that_failed_once(pool: Pool) -> None:
    assert [text for each in pool.map(again, FOUND, chunksize=1) for text in each] == []


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


def test_repairs_that_no_plant_breaks_have_tests() -> None:
    missing = []
    for title, test in CAUGHT_BY_TESTS.items():
        path, _, name = test.partition("::")
        if f"def {name}(" not in (TESTS / path).read_text():
            missing.append(f"{title}: {test}")
    assert not missing


def test_nothing_stays_planted() -> None:
    for number, bug in PLANTS.items():
        patches = bug.apply()
        before = [owner.__dict__.get(name) for owner, name, _replacement in patches]
        with planted(number):
            assert all(owner.__dict__[name] is not old for (owner, name, _), old in zip(patches, before, strict=True))
        assert all(owner.__dict__.get(name) is old for (owner, name, _), old in zip(patches, before, strict=True))
