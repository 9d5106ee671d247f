"""Fixed seeds of every workload, and planted bugs that must be caught. `make sim` runs more."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.sim.planted import PLANTS, planted
from tests.sim.run_sim import run_one

from braid.testing.sim.workloads import WORKLOADS, run

SEEDS = 40
BATCH = 10
TRIES = 40
"""Seeds tried after the recorded one: a change of the product changes what happens in a seed."""


@pytest.mark.inv("INV1", "INV2", "INV3", "INV15")
@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_every_promise_is_kept(workload: str, first: int) -> None:
    for seed in range(first, first + BATCH):
        outcome = run(workload, seed)
        violations = "\n".join(str(violation) for violation in outcome.violations[:5])
        assert not violations, f"{violations}\nreplay with: make sim WORKLOAD={workload} SEED={seed}"
        assert outcome.counts, f"{workload} seed {seed}: {outcome.operations} operations, {outcome.faults} faults"


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_a_seed_gives_the_same_history_every_time(workload: str) -> None:
    once, again, other = run(workload, 5), run(workload, 5), run(workload, 6)
    assert once.history.lines() == again.history.lines()
    assert once.history.lines() != other.history.lines()
    assert len(once.history.events) > 100


def test_a_seed_gives_the_same_history_in_another_process() -> None:
    """Nothing depends on hashes of strings or on addresses in memory."""
    program = "from braid.testing.sim.workloads import run; print(run('W2', 3).digest, run('W9', 3).digest)"
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


@pytest.mark.parametrize("number", sorted(PLANTS))
def test_a_planted_bug_is_caught(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    bug = PLANTS[number]
    for seed in (bug.seed, *range(TRIES)):
        result = run_one((bug.workload, seed, number))
        if any(text.split(":")[0] in bug.checkers for text in result.violations):
            with capsys.disabled():
                print(f"\nplanted bug {number} ({bug.title}): caught by {bug.workload} seed {seed}", end="")
            return
    pytest.fail(f"planted bug {number} ({bug.title}) was not caught")


def test_nothing_stays_planted() -> None:
    for number, bug in PLANTS.items():
        owner, name, _ = bug.apply()
        before = owner.__dict__.get(name)
        with planted(number):
            assert owner.__dict__[name] is not before
        assert owner.__dict__.get(name) is before
