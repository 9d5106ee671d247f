"""How a row of docs/requirements.md comes about."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import row

SETTLED: dict[str, Any] = {
    "waived": {"R1": "There is none."},
    "open": {"R2": "Not built yet."},
    "clients": {"R3": {"client": "java-v5", "checks": "txn-"}},
}
PASSED = {"java-v5": {"version": "5.0", "checks": ["sends", "txn-abort", "txn-commit"]}}
SHOWN = "`make clients`: java-v5 5.0 (txn-abort, txn-commit)"


@pytest.mark.parametrize(
    ("requirement", "results", "recorded", "expected"),
    [
        ("R0", {"b.py": True, "a.py": True}, PASSED, ("pass", "a.py, b.py")),
        ("R0", {"b.py": True, "a.py": False}, PASSED, ("open", "a.py, b.py")),
        ("R0", {}, PASSED, ("open", "")),
        ("R1", {}, PASSED, ("waived", "There is none.")),
        ("R1", {"a.py": True}, PASSED, ("pass", "a.py")),
        ("R2", {"a.py": True}, PASSED, ("open", "Not built yet.")),
        ("R3", {"a.py": True}, PASSED, ("pass", f"a.py, {SHOWN}")),
        ("R3", {}, PASSED, ("pass", SHOWN)),
        ("R3", {"a.py": False}, PASSED, ("open", f"a.py, {SHOWN}")),
        ("R3", {"a.py": True}, {"java": PASSED["java-v5"]}, ("open", "a.py, `make clients`: java-v5 ? (not run)")),
        ("R3", {"a.py": True}, None, ("open", "a.py, `make clients`: java-v5 ? (not run)")),
    ],
)
def test_state_and_evidence(
    tmp_path: Path, requirement: str, results: dict[str, bool], recorded: Any, expected: tuple[str, str]
) -> None:
    record = tmp_path / "passed.json"
    if recorded is not None:
        record.write_text(json.dumps(recorded))
    assert row(requirement, results, SETTLED, record) == expected
