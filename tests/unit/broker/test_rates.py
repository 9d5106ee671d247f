"""Rates: what happens now, also for somebody who asks for the first time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker.rates import MAX_COUNTERS, Rates
from braid.model.names import TopicName
from braid.testing.clock import ManualClock
from braid.testing.raw_client import RawClient

TOPIC = "persistent://public/default/busy"


async def test_a_rate_is_that_of_the_last_ten_seconds_at_most() -> None:
    clock = ManualClock()
    rates = Rates(clock)
    count = 0
    assert rates.per_second("c", count) == 0.0
    for second in range(60):
        await clock.advance(1)
        count += 100 if second < 30 else 7
        found = rates.per_second("c", count)
        if 1 < second < 30:
            assert found == 100.0
        if second >= 41:
            assert found == 7.0
    found = 7.0
    for _second in range(12):
        await clock.advance(1)
        found = rates.per_second("c", count)
    assert found == 0.0


async def test_a_counter_that_nobody_looked_at_for_long_has_the_rate_since_then() -> None:
    clock = ManualClock()
    rates = Rates(clock)
    rates.per_second("c", 0)
    await clock.advance(60)
    assert rates.per_second("c", 600) == 10.0
    await clock.advance(0.5)
    assert rates.per_second("c", 900) == 10.0  # too close to say something new
    assert rates.per_second("c", 5) == 0.0  # begun anew
    await clock.advance(2)
    assert rates.per_second("c", 9) == 2.0


async def test_what_is_remembered_is_bounded() -> None:
    rates = Rates(ManualClock())
    for number in range(MAX_COUNTERS + 10):
        rates.per_second(number, 1)
    assert len(rates._counters) == MAX_COUNTERS


async def test_the_first_who_asks_sees_the_load_of_the_moment(world: Any, broker: Any, client: RawClient) -> None:
    """`scalable-topics dag` under load showed zeros, because it was the first look."""
    await client.producer(TOPIC, name="p")
    await client.subscribe(TOPIC, "s", permits=1000, consumer_name="c")
    for second in range(21):
        for number in range(10):
            await client.store(b"x", second * 10 + number)
        await world.advance(1)
        await asyncio.sleep(0)
    stats = await broker.service.local_segments.stats(TopicName.parse(TOPIC))
    assert stats.msg_rate_in == pytest.approx(10, rel=0.2)
    assert stats.msg_rate_out == pytest.approx(10, rel=0.2)
    assert stats.bytes_rate_in > 100
    topic = broker.topic(TOPIC)
    for key, count in (
        ((TOPIC, "producer", "p", "messages"), topic.producers["p"].messages_in),
        ((TOPIC, "subscription", "s", "messages"), topic.messages_in),
    ):
        assert broker.service.rates.per_second(key, count) == pytest.approx(10, rel=0.2)
