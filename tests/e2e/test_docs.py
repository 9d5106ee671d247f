"""The Python examples of the documentation run as they stand, against a broker on the documented address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from braid.testing.broker import BackgroundBroker

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/guides/quickstart.md"]
DOCUMENTED_URL = "pulsar://localhost:6650"


def examples() -> list[tuple[str, str]]:
    """(where, code) of each complete example: those that connect to a broker."""
    found = []
    for page in PAGES:
        blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        found += [(f"{page}:{number}", block) for number, block in enumerate(blocks) if DOCUMENTED_URL in block]
    return found


def test_there_are_examples() -> None:
    assert len(examples()) >= 3


@pytest.mark.parametrize(("where", "code"), examples(), ids=[where for where, _ in examples()])
def test_example_runs(braid_broker: BackgroundBroker, where: str, code: str) -> None:
    program = code.replace(DOCUMENTED_URL, braid_broker.service_url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{where}: {done.stderr}"
