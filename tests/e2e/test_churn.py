"""The short churn run: a topic splits and merges under load while brokers die; `make churn` is the long one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(320)  # machines are shared


@pytest.mark.req("R468-51", "R468-56")
@pytest.mark.inv("INV4", "INV6", "INV7", "INV8")
def test_nothing_is_lost_doubled_or_reordered_while_the_layout_changes() -> None:
    options = {"operations": 24, "messages": 12_000, "keys": 64, "joins": 10, "kills": 5, "seed": 7}
    command = [sys.executable, "-m", "tests.e2e.churn_loop", *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.rstrip().endswith("}"), done.stderr
    report = json.loads(done.stdout[done.stdout.index("{\n") :])
    assert done.returncode == 0, report
    assert report["violations"] == []
    assert report["acknowledged"] == 12_000
    assert report["operations"] == 24 and report["merges"] >= 8
    assert report["kills"] == 5 and report["joins"] >= 5
