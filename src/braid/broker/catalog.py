"""`TopicCatalog`: which topics exist, partitioned or not, and the rules for creating them.

Owns the records that make a topic, through the namespaces and the logs; any broker may create and list, whoever owns a topic
loads it (`service.py`). Creating and deleting race between brokers: who creates looks again afterwards whether what the topic
belongs to is still wanted, and takes the topic back if not. Must not know which topics are loaded or who owns them.
"""

from __future__ import annotations

from collections.abc import Iterable

from braid.broker.namespaces import Namespaces
from braid.errors import AlreadyExists, NotAllowed, TopicNotFound
from braid.managedledger.factory import ManagedLedgerFactory
from braid.model.names import Domain, NamespaceName, TopicName, check_new_topic


class TopicCatalog:
    """See the module; `BrokerService` adds loading and deletion."""

    def __init__(self, namespaces: Namespaces, logs: ManagedLedgerFactory) -> None:
        self.namespaces = namespaces
        self.logs = logs

    async def partition_count(self, name: TopicName, *, allow_create: bool) -> int:
        """Partitions of a topic, 0 for a plain one; creates the record of an auto-partitioned topic (6.2)."""
        check_served(name)
        policies = await self.namespaces.policies(name.namespace)
        record = await self.namespaces.partitions(name.base) if name.partition_index < 0 else None
        if record is not None:
            return record.partitions
        if await self.logs.exists(name.managed_ledger_name):
            return 0
        if name.partition_index >= 0:
            parent = await self.namespaces.partitions(name.base)
            if parent is not None and name.partition_index < parent.partitions:
                return 0
        auto = policies.auto_topic_creation
        if not allow_create:
            raise TopicNotFound(f"The topic {name} does not exist.")
        if not auto.allow_auto_topic_creation:
            raise TopicNotFound(f"The topic {name} does not exist, and its namespace creates none on first use.")
        is_special = name.local_name.endswith(("-DLQ", "-RETRY"))
        if auto.topic_type != "partitioned" or name.partition_index >= 0 or is_special:
            return 0
        try:
            await self.create_partitioned(name, auto.default_num_partitions)
        except AlreadyExists:
            return await self.partition_count(name, allow_create=False)
        return auto.default_num_partitions

    async def create_partitioned(self, name: TopicName, partitions: int, properties: dict[str, str] | None = None) -> None:
        """Create a partitioned topic: its record first, then the partitions' logs."""
        self.check_creatable(name)
        await self.namespaces.check_takes_topics(name.namespace)
        if await self.logs.exists(name.managed_ledger_name):
            raise AlreadyExists(f"A topic {name} exists already and is not partitioned.")
        await self.namespaces.create_partitioned(name, partitions, properties)
        try:
            await self.namespaces.check_takes_topics(name.namespace)
            if await self.logs.exists(name.managed_ledger_name):
                raise AlreadyExists(f"A topic {name} was just created without partitions.")
        except (TopicNotFound, AlreadyExists):
            await self.namespaces.delete_partitioned(name)
            raise
        await self._create_partitions(name, range(partitions))

    async def grow_partitioned(self, name: TopicName, partitions: int) -> None:
        await self.namespaces.grow_partitions(name, partitions)
        await self._create_partitions(name, range(partitions))

    async def _create_partitions(self, name: TopicName, numbers: Iterable[int]) -> None:
        """Their records, from any broker: whoever owns a partition loads it when it is first used."""
        for number in numbers:
            await self.logs.create(name.partition(number).managed_ledger_name)

    async def create_topic(self, name: TopicName, properties: dict[str, str] | None = None) -> None:
        """Create a plain topic, from any broker: its owner loads it when it is first used."""
        self.check_creatable(name)
        await self.namespaces.check_takes_topics(name.namespace)
        if await self.namespaces.partitions(name) is not None or not await self.logs.create(
            name.managed_ledger_name, properties
        ):
            raise AlreadyExists(f"The topic {name} already exists.")
        try:
            await self.check_created(name)
        except NotAllowed:
            raise AlreadyExists(f"The topic {name} was just created with partitions.") from None

    def check_creatable(self, name: TopicName) -> None:
        check_served(name)
        check_new_topic(name)

    async def list_topics(self, namespace: NamespaceName) -> list[str]:
        """Names of the persistent topics of a namespace, partitions one by one."""
        await self.namespaces.policies(namespace)
        parent = f"{namespace}/persistent"
        return [str(TopicName.from_managed_ledger_name(f"{parent}/{local}")) async for local in self.logs.names(parent)]

    async def may_create(self, name: TopicName) -> bool:
        """Whether a client's first use may create this topic (protocol sheet 6.5)."""
        base = name.base
        await self.namespaces.check_takes_topics(name.namespace)
        if name.partition_index >= 0:
            record = await self.namespaces.partitions(base, fresh=True)
            if record is not None:
                return name.partition_index < record.partitions and not record.deleted
        elif await self.namespaces.partitions(base) is not None:
            raise _is_partitioned(name)
        check_new_topic(name)
        policies = await self.namespaces.policies(name.namespace)
        return policies.auto_topic_creation.allow_auto_topic_creation

    async def check_created(self, name: TopicName) -> None:
        """A topic was just created: undo that if what it belongs to is being deleted or gone (TopicNotFound), or a partitioned
        topic got its name (NotAllowed)."""
        try:
            await self.namespaces.check_takes_topics(name.namespace)
            record = await self.namespaces.partitions(name.base, fresh=True)
            if record is not None and record.deleted:
                raise TopicNotFound(f"The topic {name.base} is being deleted.")
            if record is not None and name.partition_index < 0:
                raise _is_partitioned(name)
        except (TopicNotFound, NotAllowed):
            await self.logs.delete(name.managed_ledger_name)
            raise


def _is_partitioned(name: TopicName) -> NotAllowed:
    return NotAllowed(f"The topic {name} is partitioned; use its partitions.")


def check_served(name: TopicName) -> None:
    """Only `persistent://` topics are served so far; the others get a clear no."""
    if name.domain is Domain.NON_PERSISTENT:
        raise NotAllowed(f"This broker has no non-persistent topics yet; {name} cannot be used.")
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(f"This broker has no scalable topics yet; {name} cannot be used.")
