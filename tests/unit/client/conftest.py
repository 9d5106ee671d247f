"""What tests of the SDK share: a scripted topic or three real brokers, and a client of them. A test that needs another client
makes its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.unit.client.scalable_cluster import CONFIG, Cluster
from tests.unit.client.scripted_topic import QUICK, ScriptedTopic, served

import braid
from braid.client import Client
from braid.testing.broker import InProcessBroker


@pytest.fixture
async def topic() -> AsyncIterator[ScriptedTopic]:
    """A broker that is a script."""
    async with served() as scripted:
        yield scripted


@pytest.fixture
async def client(topic: ScriptedTopic) -> AsyncIterator[Client]:
    """A client of the scripted topic, which at the end answers what it held back, so that the client can close."""
    async with braid.connect(topic.url, config=QUICK) as made:
        yield made
        topic.is_paused = False
        topic.answers = True
        topic.pump()


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    """Three brokers."""
    async with InProcessBroker(brokers=3, config=CONFIG) as broker:
        yield Cluster(broker)
