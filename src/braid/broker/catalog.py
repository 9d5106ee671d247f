"""`TopicCatalog`: which topics exist, partitioned or not, and the rules for creating them.

Owns the records that make a topic, through the namespaces and the logs; any broker may create and list, whoever owns a topic
loads it (`service.py`). Creating and deleting race between brokers: who creates looks again afterwards whether what the topic
belongs to is still wanted, and takes the topic back if not. Must not know which topics are loaded or who owns them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress

from braid.broker.namespaces import Namespaces
from braid.broker.topic_records import INCARNATION, TopicRecords
from braid.errors import AlreadyExists, NotAllowed, TopicNotFound
from braid.managedledger.factory import ManagedLedgerFactory
from braid.model.names import Domain, NamespaceName, TopicName, check_new_topic


class TopicCatalog:
    """See the module; `BrokerService` adds loading and deletion."""

    def __init__(
        self, namespaces: Namespaces, logs: ManagedLedgerFactory, records: TopicRecords, *, has_scalable: bool
    ) -> None:
        self.namespaces = namespaces
        self.logs = logs
        self.records = records
        self.has_scalable = has_scalable
        """Whether scalable topics are enabled (R468-86)."""

    def check_scalable(self) -> None:
        """Raise NotAllowed if scalable topics are switched off."""
        if not self.has_scalable:
            raise NotAllowed("Scalable topics are switched off on this broker (scalable_topics.enabled).")

    def check_served(self, name: TopicName) -> None:
        """Raise NotAllowed unless producers and consumers can be attached to a topic of this domain."""
        if name.domain is Domain.TOPIC:
            self.check_scalable()
            raise NotAllowed(
                f"{name} is a scalable topic: clients use its segments, which a Pulsar 5 client or Braid's SDK does."
            )
        self.check_lookup(name)

    def check_lookup(self, name: TopicName) -> None:
        """Raise NotAllowed unless this broker can say who serves a topic of this domain."""
        if name.domain in (Domain.TOPIC, Domain.SEGMENT):
            self.check_scalable()
        else:
            check_regular(name)

    async def partition_count(self, name: TopicName, *, allow_create: bool) -> int:
        """Partitions of a topic, 0 for a plain one and for what is scalable; creates the record of an auto-partitioned topic
        (6.2)."""
        self.check_lookup(name)
        policies = await self.namespaces.policies(name.namespace)
        if name.domain in (Domain.TOPIC, Domain.SEGMENT):
            return 0
        record = await self.namespaces.partitions(name.base) if name.partition_index < 0 else None
        if record is not None:
            return record.partitions
        if await self.logs.exists(name.managed_ledger_name) or await self._is_partition(name):
            return 0
        auto = policies.auto_topic_creation
        if not allow_create:
            raise TopicNotFound(f"The topic {name} does not exist.")
        if not auto.allow_auto_topic_creation:
            raise TopicNotFound(f"The topic {name} does not exist, and its namespace creates none on first use.")
        await self._check_not_scalable(name)
        is_special = name.local_name.endswith(("-DLQ", "-RETRY"))
        if auto.topic_type != "partitioned" or name.partition_index >= 0 or is_special:
            return 0
        try:
            await self.create_partitioned(name, auto.default_num_partitions)
        except AlreadyExists:
            return await self.partition_count(name, allow_create=False)
        return auto.default_num_partitions

    async def _is_partition(self, name: TopicName) -> bool:
        parent = await self.namespaces.partitions(name.base) if name.partition_index >= 0 else None
        return parent is not None and name.partition_index < parent.partitions

    async def create_partitioned(self, name: TopicName, partitions: int, properties: dict[str, str] | None = None) -> None:
        """Create a partitioned topic: its record first, then the partitions' logs."""
        self.check_creatable(name)
        await self.namespaces.check_takes_topics(name.namespace)
        await self.check_identity(name)
        if await self.logs.exists(name.managed_ledger_name):
            raise AlreadyExists(f"A topic {name} exists already and is not partitioned.")
        await self.namespaces.create_partitioned(name, partitions, properties)
        try:
            await self.namespaces.check_takes_topics(name.namespace)
            await self.check_identity(name)
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
        await self.check_identity(name)
        if await self.namespaces.partitions(name) is not None or not await self.logs.create(
            name.managed_ledger_name, properties
        ):
            raise AlreadyExists(f"The topic {name} already exists.")
        try:
            await self.check_created(name)
        except NotAllowed:
            raise AlreadyExists(f"The topic {name} was just created with partitions.") from None

    def check_creatable(self, name: TopicName) -> None:
        check_regular(name)
        check_new_topic(name)

    async def check_identity(self, name: TopicName) -> None:
        """Raise AlreadyExists if a scalable topic has the name that a regular one is to get: they share one identity."""
        if await self.records.read(name) is not None:
            raise AlreadyExists(f"The name {name} belongs to the scalable topic {name.scalable}; choose another.")

    async def _check_not_scalable(self, name: TopicName) -> None:
        """The same for a client, which must not come again and again."""
        if await self.records.read(name) is not None:
            raise is_scalable(name)

    async def regular_partitions(self, name: TopicName) -> int | None:
        """Partitions of the regular topic with the identity of `name`, 0 if it has none, None if there is no such topic."""
        local = name.scalable.local_name
        if "/" in local:
            return None  # only a scalable topic can have such a name
        regular = TopicName.parse(f"{Domain.PERSISTENT}://{name.namespace}/{local}")
        record = await self.namespaces.partitions(regular, fresh=True)
        if record is not None and not record.deleted:
            return record.partitions
        return 0 if await self.logs.exists(regular.managed_ledger_name, fresh=True) else None

    async def regular_log(self, name: TopicName) -> str | None:
        """Which log a plain topic or a partition is now, whoever serves it: its incarnation (INV5); None if it has none."""
        return await self.logs.incarnation(name.managed_ledger_name)

    async def list_topics(self, namespace: NamespaceName) -> list[str]:
        """Names of the persistent topics of a namespace, partitions one by one."""
        await self.namespaces.policies(namespace)
        parent = f"{namespace}/persistent"
        return [str(TopicName.from_managed_ledger_name(f"{parent}/{local}")) async for local in self.logs.names(parent)]

    async def may_create(self, name: TopicName) -> bool:
        """Whether a client's first use may create this topic (protocol sheet 6.5). A segment is made only if its topic's layout
        shows it active (L-06)."""
        base = name.base
        await self.namespaces.check_takes_topics(name.namespace)
        if name.domain is Domain.SEGMENT:
            return (await self.records.listed(name)).may_materialise
        if name.partition_index >= 0:
            record = await self.namespaces.partitions(base, fresh=True)
            if record is not None:
                return name.partition_index < record.partitions and not record.deleted
        elif await self.namespaces.partitions(base) is not None:
            raise _is_partitioned(name)
        check_new_topic(name)
        await self._check_not_scalable(name)
        policies = await self.namespaces.policies(name.namespace)
        return policies.auto_topic_creation.allow_auto_topic_creation

    async def check_created(self, name: TopicName, properties: Mapping[str, str] | None = None) -> None:
        """A topic was just created, with these properties of its log: undo that if what it belongs to is being deleted or gone
        (TopicNotFound), or a partitioned topic (NotAllowed) or a scalable one (AlreadyExists) got its name."""
        try:
            await self.namespaces.check_takes_topics(name.namespace)
            if name.domain is Domain.SEGMENT:
                await self._check_segment_created(name)
                return
            await self.check_identity(name)
            record = await self.namespaces.partitions(name.base, fresh=True)
            if record is not None and record.deleted:
                raise TopicNotFound(f"The topic {name.base} is being deleted.")
            if record is not None and name.partition_index < 0:
                raise _is_partitioned(name)
        except (TopicNotFound, NotAllowed, AlreadyExists):
            with suppress(TopicNotFound):  # replaced by the log of a topic made anew meanwhile
                await self.logs.delete(name.managed_ledger_name, properties)
            raise

    async def _check_segment_created(self, name: TopicName) -> None:
        record = (await self.records.listed(name)).record
        made_for = await self.logs.properties(name.managed_ledger_name)
        if made_for is None or made_for.get(INCARNATION, "") != record.incarnation:
            raise TopicNotFound(f"The topic of the segment {name} was deleted and made anew meanwhile.")


def is_scalable(name: TopicName) -> NotAllowed:
    """What clients of a regular topic are told if a scalable one has its name."""
    return NotAllowed(
        f"{name.scalable} is a scalable topic; use that name with Braid's SDK (a producer, or a stream, queue or checkpoint "
        "consumer) or a Pulsar 5 client."
    )


def _is_partitioned(name: TopicName) -> NotAllowed:
    return NotAllowed(f"The topic {name} is partitioned; use its partitions.")


def check_regular(name: TopicName) -> None:
    """Raise NotAllowed unless this is the name of a regular topic that this broker can serve."""
    if name.domain is Domain.NON_PERSISTENT:
        raise NotAllowed(f"This broker has no non-persistent topics yet; {name} cannot be used.")
    if name.domain is not Domain.PERSISTENT:
        raise NotAllowed(f"{name} is not a regular topic; use the calls for scalable topics (scalable, segments).")
