"""Keep your own position: results and the checkpoint are stored together, so that a restart counts nothing twice.

Start a broker first: `braid standalone`. Then: `python examples/checkpoints.py [pulsar://localhost:6650] [http://localhost:8080]`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import braid
from braid.client import EARLIEST, Client
from braid.client.checkpoints import Checkpoint

TOPIC = "topic://public/default/example-visits"
PAGES = ("home", "docs", "blog")
VISITS = 300


class Store:
    """Stands for a database: both change in one transaction."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.place = b""


async def count_visits(client: Client, store: Store, visits: int) -> None:
    """Count some visits from where the store says, and note how far it got."""
    start = Checkpoint.from_bytes(store.place) if store.place else EARLIEST
    async with client.checkpoint_consumer(TOPIC, start=start, schema=str) as consumer:
        while visits > 0:
            messages = await consumer.receive_batch(min(50, visits), timeout=10)
            visits -= len(messages)
            store.counts.update(message.value for message in messages)
            store.place = consumer.checkpoint().to_bytes()


async def main(url: str, admin_url: str) -> None:
    store = Store()
    async with braid.connect(url) as client, braid.AdminClient(admin_url) as admin:
        await admin.scalable_topics.create(TOPIC, segments=2)
        async with client.producer(TOPIC, schema=str) as producer:
            for number in range(VISITS):
                await producer.send(PAGES[number % len(PAGES)], key=f"visitor-{number}")
                if number == VISITS // 2:
                    await admin.scalable_topics.merge_segments(TOPIC, 0, 1)
        await count_visits(client, store, VISITS // 3)
        print(f"counted {store.counts.total()} visits, then the program ended; its checkpoint has {len(store.place)} bytes")
        await count_visits(client, store, VISITS - VISITS // 3)
        print(f"and went on: {dict(sorted(store.counts.items()))}")
        assert store.counts == {page: VISITS // len(PAGES) for page in PAGES}, "a visit was lost or counted twice"
        await admin.scalable_topics.delete(TOPIC, force=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(*given, *["pulsar://localhost:6650", "http://localhost:8080"][len(given) :]))
