"""The short run of the move loop: ownership moves under load, a broker dies, a broker sleeps past its session."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LOOP = Path(__file__).with_name("move_loop.py")
pytestmark = pytest.mark.timeout(320)  # machines are shared


@pytest.mark.inv("INV2")
def test_nothing_is_lost_or_doubled_while_ownership_moves() -> None:
    done = subprocess.run(
        [sys.executable, str(LOOP), "--seconds", "9", "--interval", "0.4", "--seed", "3"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.rstrip().endswith("}"), done.stderr
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert done.returncode == 0, report
    assert report["acknowledged"] > 1000
    assert report["moves"] > 5
    assert report["losses"] > 0, "the paused broker held nothing"
    assert report["lost"] == report["duplicated"] == report["disordered"] == report["unseen"] == 0
