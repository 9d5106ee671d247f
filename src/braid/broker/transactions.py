"""The transactional side of a broker: what it shares between its topics, and when that starts and ends.

Owns the composition of `braid.txn` with this broker, and the topic by which Pulsar's older clients find coordinators: nobody
stores it, only its partitions are looked up. Must not know commands or HTTP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from braid.broker.registry import BrokerInfo
from braid.broker.tc_watch import CoordinatorWatches
from braid.errors import InvalidTopicName, NotAllowed, TopicNotFound, TransactionCoordinatorNotFound
from braid.metadata.api import MetadataStore
from braid.model.names import TopicName
from braid.runtime.env import Runtime
from braid.txn.config import TransactionConfig
from braid.txn.coordinator import TransactionCoordinator
from braid.txn.decisions import Decisions
from braid.txn.partitions import CoordinatorPartitions
from braid.txn.sinks import Sinks
from braid.txn.store import TransactionStore
from braid.txn.sweeps import TransactionSweeps

if TYPE_CHECKING:
    from braid.broker.service import BrokerService

ASSIGN_TOPIC: Final = TopicName.parse("persistent://pulsar/system/transaction_coordinator_assign")


class Transactions:
    """One per broker: `BrokerService.transactions`."""

    def __init__(self, service: BrokerService, runtime: Runtime, metadata: MetadataStore, config: TransactionConfig) -> None:
        self.config = config
        self.store = TransactionStore(metadata, runtime.clock)
        self.decisions = Decisions(metadata, self.store, runtime.clock, reconcile_seconds=config.reconcile_seconds)
        self.coordinator = TransactionCoordinator(self.store, runtime.clock, config)
        self.sinks = Sinks(self.store, self.coordinator, runtime.clock, config)
        self.watches = CoordinatorWatches(runtime.clock, lambda: self.coordinators, self._picture)
        self.partitions: CoordinatorPartitions | None = None
        """None before the broker is announced."""
        self._sweeps: TransactionSweeps | None = None
        self._service = service
        self._clock = runtime.clock

    async def start(self) -> None:
        """The broker is announced: take part. Raises ConfigError if the cluster has another number of coordinators.

        Where transactions are switched off nothing new begins, but what was open still times out and is collected."""
        self.decisions.start()
        ownership = self._service.ownership
        self.partitions = CoordinatorPartitions(
            self.store.metadata,
            self._clock,
            self.config.coordinators,
            broker_id=ownership.broker_id,
            incarnation=ownership.incarnation,
        )
        self.partitions.on_change(self.watches.changed)
        self._sweeps = TransactionSweeps(
            self.store, self.coordinator, self.partitions, self._clock, self.config, self._load_segment, self.sinks
        )
        await self.partitions.start()
        self._sweeps.start()
        if self.config.enabled:
            self.watches.start()

    async def leave(self) -> None:
        """The first step of stopping: others lead and sweep; what this broker serves still learns of decisions."""
        if self._sweeps is not None:
            await self._sweeps.close()
        await self.watches.close()
        if self.partitions is not None:
            await self.partitions.close()

    async def close(self) -> None:
        """After the topics are closed."""
        await self.decisions.close()

    def kill(self) -> None:
        if self._sweeps is not None:
            self._sweeps.kill()
        self.watches.kill()
        if self.partitions is not None:
            self.partitions.kill()
        self.decisions.kill()

    async def _load_segment(self, segment: str) -> bool:
        """Have a topic's owner finish what ended transactions left there; False if there is no such topic."""
        try:
            await self._service.segments.settle(TopicName.parse(segment))
        except (TopicNotFound, InvalidTopicName):
            return False
        return True

    # What commands ask.

    @property
    def coordinators(self) -> int:
        """Partitions there are."""
        return self.config.coordinators

    def check_enabled(self) -> None:
        """Raise NotAllowed if transactions are switched off."""
        if not self.config.enabled:
            raise NotAllowed("Transactions are switched off on this broker (transactions.enabled).")

    def check_coordinator(self, number: int) -> None:
        """Raise TransactionCoordinatorNotFound unless there is such a partition."""
        if not 0 <= number < self.coordinators:
            raise TransactionCoordinatorNotFound(
                f"There is no transaction coordinator {number}; they are 0 to {self.coordinators - 1}."
            )

    def partition_count(self, name: TopicName) -> int | None:
        """Of the topic that stands for the coordinators; None for any other."""
        if name != ASSIGN_TOPIC:
            return None
        self.check_enabled()
        return self.coordinators

    def find(self, name: TopicName) -> BrokerInfo | None:
        """Where clients of a coordinator go, by the name of its partition of that topic: to its leader, or to us while nobody
        is known to lead it. None for any other topic."""
        if not name.is_partition or name.base != ASSIGN_TOPIC:
            return None
        self.check_enabled()
        self.check_coordinator(name.partition_index)
        return self._leaders().get(name.partition_index) or self._service.ownership.me

    def _picture(self) -> dict[int, str]:
        return {number: broker.service_url for number, broker in self._leaders().items()}

    def _leaders(self) -> dict[int, BrokerInfo]:
        """Those that are known and registered."""
        found: dict[int, BrokerInfo] = {}
        if self.partitions is not None:
            for number, broker_id in self.partitions.snapshot().items():
                if (broker := self._service.ownership.broker(broker_id)) is not None:
                    found[number] = broker
        return found
