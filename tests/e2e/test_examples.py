"""The programs in `examples/` run as they stand against a broker, end well and say what they promise.

Those of Spark are tried where there is a session of Spark, with its guides.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.testing.broker import BackgroundBroker

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
PROMISES = {
    "admin.py": "as expected (404)",
    "stream.py": "100 orders of 4 users came, each user's in order",
    "work_queue.py": "16 mails delivered; after 12 attempts put aside: user-0@full.example, user-10@full.example",
    "checkpoints.py": "and went on: {'blog': 100, 'docs': 100, 'home': 100}",
    "exactly_once.py": "100 orders became 100 invoices, one each, although batches failed half-way",
}


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def test_all_are_tried() -> None:
    found = {path.name for path in EXAMPLES.glob("*.py") if not path.name.startswith(("demo", "spark_"))}
    assert found == set(PROMISES)


@pytest.mark.parametrize("name", list(PROMISES))
def test_example(name: str, broker: BackgroundBroker) -> None:
    addresses = [broker.http_url] if name == "admin.py" else [broker.service_url, broker.http_url]
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *addresses], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert PROMISES[name] in done.stdout
    assert not done.stderr
