"""What is looked at when a fault run has ended: the output, by the official client, and what is left in the broker's store."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from pathlib import Path
from typing import Any


def read_all(url: str, topic: str, least: int) -> list[str]:
    """The output, by the official client."""
    import pulsar

    client = pulsar.Client(url, logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull))
    consumer = client.subscribe(topic, "check", initial_position=pulsar.InitialPosition.Earliest)
    found: list[str] = []
    try:
        while True:
            message = consumer.receive(timeout_millis=20_000 if len(found) < least else 1_000)
            found.append(message.data().decode())
            consumer.acknowledge(message)
    except pulsar.Timeout:
        return found
    finally:
        client.close()


def open_transactions(http_url: str) -> list[Any]:
    """Those that are open, once they had time to be ended."""
    deadline = time.monotonic() + 150
    while True:
        with urllib.request.urlopen(f"{http_url}/admin/v3/transactions") as answer:
            found: list[Any] = json.load(answer)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(1)


async def count_ops(folder: Path) -> int:
    """Records of operations in the store of a broker that has stopped."""
    from braid.metadata.api import IndexSpan
    from braid.metadata.backends.embedded import open_store
    from braid.runtime.env import Runtime
    from braid.txn.records import ACKS_BY_SEGMENT_SUBSCRIPTION, WRITES_BY_SEGMENT

    engine = await open_store(Runtime(), path=folder / "data" / "metadata")
    store = engine.handle("check")
    count = 0
    try:
        for name in (WRITES_BY_SEGMENT, ACKS_BY_SEGMENT_SUBSCRIPTION):
            async for _record in store.scan(IndexSpan(name)):
                count += 1
    finally:
        await store.close()
        await engine.close()
    return count
