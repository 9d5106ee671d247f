"""Pytest plug-in of the test kit: installed with Braid, active in every project that tests against it.

    def test_orders(braid_broker):
        client = pulsar.Client(braid_broker.service_url)
        ...
        braid_broker.advance(60)  # the broker's clock stands still until you move it

Nothing of Braid is imported until a fixture is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from braid.testing.broker import BackgroundBroker


@pytest.fixture
def braid_broker() -> Iterator[BackgroundBroker]:
    """A fresh broker in memory, on a thread of its own: `service_url`, `http_url`, `advance(seconds)`."""
    from braid.testing.broker import BackgroundBroker
    from braid.testing.clock import ManualClock

    with BackgroundBroker(clock=ManualClock()) as broker:
        yield broker
