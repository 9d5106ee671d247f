"""What the REST handlers share: the broker they administer, and the ways to its topics.

Owns the rules of calls about topics: the name of a partitioned topic is not the name of a topic with messages, and what
another broker owns is answered there (`owners.py`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from itertools import islice
from math import inf
from typing import Any, TypeVar

from braid.broker.catalog import check_regular
from braid.broker.clusters import Clusters
from braid.broker.ownership import Ownership
from braid.broker.server import BrokerServer
from braid.broker.service import BrokerService
from braid.broker.topic import Topic
from braid.errors import NotAllowed, TopicNotFound
from braid.model.names import TopicName
from braid.web.calls import Ask
from braid.web.owners import Owners

T = TypeVar("T")
MAX_LOST_SHOWN = 20
"""Topics with lost ledgers that are named in warnings."""


class Admin:
    """One broker as its administrators see it."""

    def __init__(
        self,
        service: BrokerService,
        server: BrokerServer,
        is_writable: Callable[[], bool],
        disk_bytes: Callable[[], int | None] = lambda: None,
        space: Callable[[], tuple[float, int]] = lambda: (inf, 0),
    ) -> None:
        self.service = service
        self.server = server
        self.is_writable = is_writable
        """Whether storage takes writes at the moment."""
        self.disk_bytes = disk_bytes
        """Size of the disk; None if there is none."""
        self.space = space
        """Free bytes of the disk of the ledgers, without end in memory, and how many of them are kept in reserve."""
        self.http_url = ""
        self.loop_lag = 0.0
        self.rates = service.rates
        self.clusters = Clusters(service.metadata, service.config.cluster_name)
        self.slow = service.runtime.slow
        self.slow.set_threshold(service.config.slow_operation_ms)
        self.being_made: set[tuple[str, str]] = set()
        """Subscriptions, by topic, that a call is just creating: another one that wants to comes too late."""
        self.requests = 0
        self.redirects = 0

    @property
    def ownership(self) -> Ownership:
        return self.service.ownership

    @property
    def broker_id(self) -> str:
        """Host and HTTP port."""
        return self.http_url.removeprefix("http://")

    def warnings(self) -> list[str]:
        """What an administrator should look at, as sentences; the broker serves all the same."""
        found = []
        unread, disk = self.service.retention.unread_bytes, self.disk_bytes()
        if disk and unread > disk // 2:
            found.append(
                f"{unread >> 20} MB are kept only because no subscription has read them (retention.unread_minutes), more than "
                f"half of the disk of {disk >> 20} MB. Nothing is deleted for that: set a retention policy for the namespaces "
                "of these topics, or truncate them."
            )
        lost = self.service.lost
        found += list(islice(lost.values(), MAX_LOST_SHOWN))
        if len(lost) > MAX_LOST_SHOWN:
            found.append(f"{len(lost) - MAX_LOST_SHOWN} more topics have ledgers that their store does not know.")
        return found

    async def partitions(self, name: TopicName) -> list[TopicName]:
        """The partitions of a partitioned topic; empty for any other name."""
        check_regular(name)
        record = None if name.is_partition else await self.service.namespaces.partitions(name)
        return [] if record is None else [name.partition(number) for number in range(record.partitions)]

    async def check_exists(self, name: TopicName) -> None:
        """404 unless there is a topic of this name, partitioned or not."""
        await self.service.namespaces.policies(name.namespace)
        if not await self.partitions(name) and not await self.service.logs.exists(name.managed_ledger_name):
            raise await self.not_found(name, f"The topic {name} does not exist.")

    async def not_found(self, name: TopicName, reason: str) -> TopicNotFound:
        """404 for a name without a regular topic; says so if a scalable one has it."""
        if self.service.has_scalable and await self.service.records.read(name) is not None:
            reason += (
                f" {name.scalable} is a scalable topic: use `braid scalable-topics`, AdminClient.scalable_topics or "
                "/admin/v2/scalable."
            )
        return TopicNotFound(reason)

    async def loaded(self, ask: Ask, *, create: bool = False) -> Topic:
        """The plain topic or partition the call names, served here; 405 for a partitioned topic, 307 if it is elsewhere."""
        name = ask.topic
        if await self.partitions(name):
            raise NotAllowed(f"The topic {name} is partitioned; ask for one of its partitions, such as {name.partition(0)}.")
        if not create:
            await self.check_exists(name)
        await Owners(ask).here(name)
        return await self.service.topic(name, create=create)

    async def each(
        self,
        ask: Ask,
        work: Callable[[TopicName], Awaitable[T]],
        *,
        create: bool = False,
        tolerate: tuple[int, ...] = (),
    ) -> list[T | Any]:
        """`work` for each topic behind the name: the partitions (each at its owner), or the plain topic (here, else 307)."""
        name = ask.topic
        if parts := await self.partitions(name):
            return await Owners(ask).each(parts, work, tolerate=tolerate)
        if not create:
            await self.check_exists(name)
        await Owners(ask).here(name)
        return [await work(name)]
