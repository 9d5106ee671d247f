"""Admin commands as real processes: exit codes, pipes, environment, completion."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.testing.broker import BackgroundBroker

COMMAND = [sys.executable, "-m", "braid.cli.main"]


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


def run(broker: BackgroundBroker, *arguments: str, **environment: str) -> tuple[int, str, str]:
    env = {**os.environ, "BRAID_ADMIN_URL": broker.http_url, **environment}
    done = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=env, stdin=subprocess.DEVNULL, timeout=30, check=False
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_session(broker: BackgroundBroker) -> None:
    assert run(broker, "topics", "create", "orders") == (0, "done: topics create (topic orders)\n", "")
    code, out, err = run(broker, "topics", "stats", "orders", "--output", "json")
    assert (code, json.loads(out)["msgInCounter"], err) == (0, 0, "")
    code, out, err = run(broker, "topics", "delete", "orders")
    assert (code, out) == (2, "")
    assert err == "error: braid topics delete orders: this cannot be undone; add --yes to do it without being asked.\n"
    assert run(broker, "topics", "delete", "orders", "--yes")[0] == 0
    code, out, err = run(broker, "topics", "stats", "orders")
    assert (code, out, err.count("\n")) == (1, "", 1)


def test_a_broker_that_is_down(broker: BackgroundBroker) -> None:
    code, out, err = run(broker, "brokers", "list", BRAID_ADMIN_URL="http://localhost:1")
    assert (code, out) == (1, "")
    assert err.startswith("error: No broker answers at http://localhost:1 (connection refused).")


def test_shells_can_complete(broker: BackgroundBroker) -> None:
    code, out, _err = run(broker, _BRAID_COMPLETE="complete_bash", COMP_WORDS="braid topics internal", COMP_CWORD="2")
    assert (code, out.split()) == (0, ["internal-stats"])


def test_a_reader_that_goes_away(broker: BackgroundBroker) -> None:
    piped = f"{sys.executable} -m braid.cli.main brokers configuration --url {broker.http_url} | head -c 1"
    done = subprocess.run(["bash", "-c", piped], capture_output=True, text=True, timeout=30, check=False)
    assert "Traceback" not in done.stderr


ROOT = Path(__file__).parents[3]
GUIDE = re.findall(r"```python\n(.*?)```", (ROOT / "docs/guides/admin-cli.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("program", [*GUIDE, (ROOT / "examples/admin.py").read_text()], ids=["guide-0", "guide-1", "example"])
def test_the_examples_run(broker: BackgroundBroker, program: str) -> None:
    text = program.replace("http://localhost:8080", broker.http_url)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
