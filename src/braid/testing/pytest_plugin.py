"""Pytest plug-in of the test kit: installed with Braid, active in every project that tests against it.

    def test_orders(braid_broker):
        client = pulsar.Client(braid_broker.service_url)
        ...
        braid_broker.advance(60)  # the broker's clock stands still until you move it

Nothing of Braid is imported until a fixture is used, so that the plug-in harms no run that does not use it: the broker needs
packages that an SDK-only installation does not have.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from braid.testing.broker import BackgroundBroker


@pytest.fixture
def braid_broker() -> Iterator[BackgroundBroker]:
    """A fresh broker in memory, on a thread of its own: `service_url`, `http_url`, `advance(seconds)`."""
    with ExitStack() as stack:
        try:
            from braid.testing.broker import BackgroundBroker
            from braid.testing.clock import ManualClock

            broker = stack.enter_context(BackgroundBroker(clock=ManualClock()))  # imports the rest while it starts
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "braid":
                raise
            pytest.fail(
                f"The fixture braid_broker needs the package {error.name}, which is not installed; "
                "install Braid with its server: braidmq[server].",
                pytrace=False,
            )
        yield broker
