"""The short run of the kill loop: five kills keep every promise; a broker that breaks one is found out."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LOOP = Path(__file__).with_name("kill_loop.py")
pytestmark = pytest.mark.timeout(320)  # machines are shared


def run(folder: Path, kills: int, *arguments: str) -> tuple[int, dict[str, Any]]:
    """Exit code and summary of a run in a process of its own, as `make kill` starts it."""
    done = subprocess.run(
        [sys.executable, str(LOOP), "--json", "--kills", str(kills), "--seed", "3", "--folder", str(folder), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


@pytest.mark.inv("INV1")
def test_five_kills_lose_nothing(tmp_path: Path) -> None:
    code, summary = run(tmp_path, 5)
    assert (code, summary["first_problems"]) == (0, [])
    assert summary["kills"] == 5
    assert summary["kills_with_sends_in_flight"] >= 4
    assert summary["acknowledged"] > 1000
    assert summary["acks_with_receipt"] > 1000


@pytest.mark.inv("INV1")
@pytest.mark.parametrize("plant", ["early-receipt", "reorder"])
def test_a_broken_broker_is_found_out(tmp_path: Path, plant: str) -> None:
    code, summary = run(tmp_path, 2, "--plant", plant)
    assert code == 1
    assert summary["problems"] > 0
