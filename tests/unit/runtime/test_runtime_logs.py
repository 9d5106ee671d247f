"""What a process says and what it keeps to itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from braid.runtime.logs import LogSettings, setup


@pytest.fixture
def _as_before() -> Iterator[None]:
    root, client = logging.getLogger(), logging.getLogger("httpx")
    before = (root.handlers[:], root.level, client.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    client.setLevel(before[2])


@pytest.mark.usefixtures("_as_before")
@pytest.mark.parametrize(
    ("level", "effective"), [("debug", logging.WARNING), ("info", logging.WARNING), ("error", logging.ERROR)]
)
def test_calls_between_brokers_are_not_logged_one_by_one(level: str, effective: int) -> None:
    setup(LogSettings(level=level))
    assert logging.getLogger("httpx").getEffectiveLevel() == effective
    assert logging.getLogger("braid").getEffectiveLevel() == getattr(logging, level.upper())
