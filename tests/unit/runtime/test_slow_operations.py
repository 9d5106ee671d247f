"""The slow-operation log: one line with what, which and how long, at a bounded rate."""

from __future__ import annotations

import logging

import httpx
import pytest

import braid
from braid.broker.config import BrokerConfig
from braid.runtime.env import Runtime
from braid.runtime.slow import QUIET_SECONDS, SlowOperations
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock
from braid.web.config import StandaloneConfig


async def test_only_what_is_slow_is_said_and_seldom(caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    slow = SlowOperations(clock, 100)
    slow.note("topic load", "fast", 0.099)
    assert caplog.messages == []
    slow.note("topic load", "orders", 0.25)
    assert caplog.messages == ["slow topic load: orders took 250 ms"]
    for number in range(3):
        slow.note("topic load", f"t{number}", 0.3)
    slow.note("ledger flush", "the journal", 1.0)
    assert caplog.messages[1:] == ["slow ledger flush: the journal took 1000 ms"]
    await clock.advance(QUIET_SECONDS)
    slow.note("topic load", "again", 0.5)
    assert caplog.messages[2:] == ["slow topic load: again took 500 ms; 3 more since"]
    assert slow.counts == {"topic load": 5, "ledger flush": 1}


def test_zero_turns_it_off(caplog: pytest.LogCaptureFixture) -> None:
    slow = SlowOperations(ManualClock(), 0)
    slow.note("topic load", "orders", 1e6)
    assert (caplog.messages, slow.counts) == ([], {})


def test_every_runtime_has_one_on_its_own_clock() -> None:
    clock = ManualClock()
    assert Runtime(clock=clock).slow is not Runtime(clock=clock).slow


def test_each_kind_of_operation_is_reported(tmp_path: object, caplog: pytest.LogCaptureFixture) -> None:
    """With a threshold of nothing, everything is slow."""
    config = StandaloneConfig(broker=BrokerConfig(slow_operation_ms=1))
    with caplog.at_level(logging.WARNING), BackgroundBroker(config=config, durable=True) as broker:

        async def work() -> None:
            node = broker.broker.nodes[0]
            for runtime in (node.runtime, broker.broker.standalone.runtime):
                runtime.slow.threshold = 0.0
            async with braid.connect(broker.service_url) as client:
                producer = await client.producer("slow", batching=False)
                await producer.send(b"x")
            async with httpx.AsyncClient(base_url=broker.http_url) as http:
                assert (await http.get("/admin/v2/tenants")).status_code == 200
                seen.append((await http.get("/metrics")).text)

        seen: list[str] = []
        broker.run(work())
    said = "\n".join(caplog.messages)
    for what in (
        "admin request: GET /admin/v2/tenants",
        "topic load: persistent://public/default/slow",
        "ledger flush: a group",
    ):
        assert f"slow {what}" in said
    for what in ("publish: 1 entries of public/default/persistent/slow", "metadata write: /"):
        assert f"slow {what}" in said
    assert 'braid_slow_operations_total{operation="topic load"} 1.0' in seen[0]
