"""The test kit with several brokers."""

from __future__ import annotations

from typing import Any

import pytest

import braid
from braid.errors import ConfigError
from braid.testing.broker import InProcessBroker
from braid.testing.clock import ManualClock


async def test_three_brokers_in_process_are_killed_and_paused_by_number() -> None:
    async with InProcessBroker(brokers=3, clock=ManualClock(), with_http=False) as cluster:
        assert cluster.service_urls.count(",") == 2
        assert cluster.service_url == cluster.nodes[0].service_url
        async with braid.connect(cluster.service_urls) as client, client.producer("t") as producer:
            await producer.send(b"x")
        await cluster.kill(1)
        cluster.pause(2)
        await cluster.advance(11)
        assert [info.broker_id for info in await cluster.nodes[0].service.ownership.brokers()] == [cluster.nodes[0].broker_id]
        cluster.resume(2)
        await cluster.advance(1)
        assert len(await cluster.nodes[0].service.ownership.brokers()) == 2
        await cluster.add_broker()
        await cluster.advance(1)
        assert len(await cluster.nodes[0].service.ownership.brokers()) == 3
        assert cluster.service_urls.count(",") == 2, "the dead are not named"
        await cluster.stop(2)
        await cluster.advance(1)
        assert len(await cluster.nodes[0].service.ownership.brokers()) == 2


async def test_a_single_broker_is_not_paused() -> None:
    async with InProcessBroker(with_http=False) as broker:
        with pytest.raises(ConfigError, match="several"):
            broker.pause(0)


@pytest.mark.braid_brokers(2)
def test_the_fixture_starts_as_many_as_are_asked_for(braid_broker: Any) -> None:
    assert braid_broker.service_urls.count(",") == 1
    braid_broker.kill(1)
    braid_broker.advance(11)
    assert braid_broker.service_urls.count(",") == 0
