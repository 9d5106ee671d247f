"""A scalable topic: keyed messages in, in order out, while the topic is split underneath.

Start a broker first: `braid standalone`. Then: `python examples/stream.py [pulsar://localhost:6650] [http://localhost:8080]`.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

import braid

TOPIC = "topic://public/default/example-orders"
USERS = ("ada", "grace", "linus", "guido")
ROUNDS = 25


class Order(msgspec.Struct):
    """Travels as JSON; a dataclass would do as well."""

    user: str
    number: int


async def main(url: str, admin_url: str) -> None:
    async with braid.connect(url) as client, braid.AdminClient(admin_url) as admin:
        await admin.scalable_topics.create(TOPIC, segments=1)
        async with client.producer(TOPIC, schema=Order) as producer:
            for number in range(ROUNDS):
                for user in USERS:
                    await producer.send(Order(user, number), key=user)
                if number == ROUNDS // 2:
                    await admin.scalable_topics.split_segment(TOPIC, 0)
                    print("split segment 0; the producer did not notice")

        last = dict.fromkeys(USERS, -1)
        async with client.stream_consumer(TOPIC, "billing", name="billing-1", schema=Order) as consumer:
            for _ in range(ROUNDS * len(USERS)):
                message = await consumer.receive(timeout=10)
                order = message.value
                assert order.number == last[order.user] + 1, f"{order} came after {last[order.user]}"
                last[order.user] = order.number
                # Acknowledge as you go: the children of a split follow when their parent is acknowledged to its end.
                await consumer.acknowledge_cumulative(message)
        print(f"{ROUNDS * len(USERS)} orders of {len(USERS)} users came, each user's in order")
        await admin.scalable_topics.delete(TOPIC, force=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    asyncio.run(main(*given, *["pulsar://localhost:6650", "http://localhost:8080"][len(given) :]))
