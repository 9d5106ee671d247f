"""The short form of the fault run: a real cluster, real kills, each kind of fault once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parent / "faults.py"


@pytest.mark.timeout(600)
def test_output_is_exactly_once_under_faults(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(RUN), "--short", "--folder", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert "0 duplicates, 0 missing, 0 open transactions, 0 operation records" in done.stdout
