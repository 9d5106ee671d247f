"""Administer a broker from Python: make a namespace and topics in it, look at them, move a subscription, clean up.

Start a broker first: `braid standalone`. Then: `python examples/admin.py [http://localhost:8080]`.
"""

from __future__ import annotations

import asyncio
import sys

import braid
from braid.errors import Conflict, NotFound


async def main(url: str) -> None:
    async with braid.AdminClient(url) as admin:
        print("brokers:", ", ".join(await admin.brokers.list()), "- version", await admin.brokers.version())

        try:
            await admin.tenants.create("example", admin_roles=["me"])
            await admin.namespaces.create("example/shop")
        except Conflict:
            print("example/shop is already there")
        await admin.namespaces.set_retention("example/shop", minutes=60, megabytes=-1)

        await admin.topics.create("example/shop/orders", partitions=2)
        await admin.topics.create("example/shop/audit")
        await admin.subscriptions.create("example/shop/audit", "reader", at="earliest")

        for name in await admin.topics.list("example/shop"):
            stats = await admin.topics.stats(name)
            backlog = {subscription: each.msg_backlog for subscription, each in stats.subscriptions.items()}
            print(f"{name}: {stats.msg_in_counter} messages, backlog {backlog}, served by {stats.owner_broker}")

        await admin.subscriptions.reset("example/shop/audit", "reader", "latest")
        try:
            await admin.topics.stats("example/shop/nothing")
        except NotFound as error:
            print(f"as expected ({error.http_status}): {error}")

        for topic in ("orders", "audit"):
            await admin.topics.delete(f"example/shop/{topic}")
        await admin.namespaces.delete("example/shop")
        await admin.tenants.delete("example")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://localhost:8080"))
