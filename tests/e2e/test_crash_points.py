"""A crash at every step of every plan of scalable topics; see `crash_loop.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLANS = ("create", "split", "merge", "prune", "delete", "create-subscription", "delete-subscription", "seek", "clear-backlog")


def run() -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.e2e.crash_loop"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)


@pytest.mark.timeout(300)
@pytest.mark.inv("INV4", "INV6", "INV7", "INV8")
def test_a_crash_at_every_step_of_every_plan(capsys: pytest.CaptureFixture[str]) -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert all(f"'{plan}': " in done.stdout for plan in PLANS), done.stdout
    with capsys.disabled():
        print("\n" + done.stdout.strip(), end="")
