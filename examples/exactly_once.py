"""Read, process, write, each message exactly once: a batch's results and its acknowledgment are one transaction.

Start a broker first: `braid standalone`. Then:
`python examples/exactly_once.py [pulsar://localhost:6650] [http://localhost:8080]`.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter

import msgspec

import braid
import braid.errors
from braid.client import Client, Producer, StreamConsumer

ORDERS = "topic://public/default/example-orders-in"
INVOICES = "topic://public/default/example-invoices"
COUNT = 100


class Order(msgspec.Struct):
    number: int
    user: str


class Invoice(msgspec.Struct):
    order: int
    user: str


class PrinterJam(Exception):
    """What sometimes goes wrong in the middle of a batch."""


async def invoice_a_batch(client: Client, orders: StreamConsumer, invoices: Producer, *, jams: bool) -> int:
    """How many orders were dealt with: all that came, or none of them."""
    async with client.transaction(timeout=30) as txn:  # commits at the end, aborts on an exception
        batch = await orders.receive_batch(10, timeout=1)
        if not batch:
            return 0
        # Acknowledge first: what an aborted transaction has acknowledged comes again by itself, in order.
        await orders.acknowledge_cumulative(batch[-1], txn=txn)
        for message in batch:
            order = message.value
            await invoices.send(Invoice(order.number, order.user), key=message.key, txn=txn)
        if jams:
            raise PrinterJam
    return len(batch)


async def main(url: str, admin_url: str) -> None:
    async with braid.connect(url) as client, braid.AdminClient(admin_url) as admin:
        await admin.scalable_topics.create(ORDERS, segments=1)
        async with client.producer(ORDERS, schema=Order) as producer:
            for number in range(COUNT):
                user = f"user-{number % 7}"
                await producer.send(Order(number, user), key=user)

        done = jams = attempts = 0
        async with (
            client.stream_consumer(ORDERS, "invoicing", name="invoicing-1", schema=Order) as orders,
            client.producer(INVOICES, schema=Invoice) as invoices,
        ):
            while done < COUNT:
                attempts += 1
                if attempts == 5:
                    await admin.scalable_topics.split_segment(ORDERS, 0)
                    print("split segment 0 of the orders")
                try:
                    done += await invoice_a_batch(client, orders, invoices, jams=attempts % 4 == 2)
                except PrinterJam:
                    jams += 1
                except braid.errors.TransactionConflict as error:  # the segment went elsewhere, the broker failed, ...
                    print(f"again: {error}")

        found: Counter[int] = Counter()
        async with client.stream_consumer(INVOICES, "audit", schema=Invoice) as audit:
            while batch := await audit.receive_batch(COUNT, timeout=1):
                found.update(message.value.order for message in batch)
                await audit.acknowledge_cumulative(batch[-1])
        assert jams
        assert found == Counter(range(COUNT)), found
        print(f"{COUNT} orders became {found.total()} invoices, one each, although batches failed half-way")
        for topic in (ORDERS, INVOICES):
            await admin.scalable_topics.delete(topic, force=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(*given, *["pulsar://localhost:6650", "http://localhost:8080"][len(given) :]))
