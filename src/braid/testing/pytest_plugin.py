"""Pytest plug-in of the test kit: installed with Braid, active in every project that tests against it.

    def test_orders(braid_broker):
        client = pulsar.Client(braid_broker.service_url)
        ...
        braid_broker.advance(60)  # the broker's clock stands still until you move it

    @pytest.mark.braid_brokers(3)  # three brokers over one store: kill(1), pause(2), resume(2), service_urls
    def test_failover(braid_broker): ...

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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "braid_brokers(count): how many brokers the fixture braid_broker starts, one by default")


@pytest.fixture
def braid_broker(request: pytest.FixtureRequest) -> Iterator[BackgroundBroker]:
    """A fresh broker in memory, on a thread of its own: `service_url`, `http_url`, `advance(seconds)`."""
    mark = request.node.get_closest_marker("braid_brokers")
    count = 1 if mark is None else int(mark.args[0])
    with ExitStack() as stack:
        try:
            from braid.testing.broker import BackgroundBroker
            from braid.testing.clock import ManualClock

            broker = stack.enter_context(
                BackgroundBroker(clock=ManualClock(), brokers=count)
            )  # imports the rest while it starts
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] == "braid":
                raise
            pytest.fail(
                f"The fixture braid_broker needs the package {error.name}, which is not installed; "
                "install Braid with its server: braidmq[server].",
                pytrace=False,
            )
        yield broker
