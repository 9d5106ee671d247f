"""The transactional side of a broker: what it shares between its topics, and when that starts and ends.

Owns the composition of `braid.txn` with this broker. Must not know commands or HTTP.
"""

from __future__ import annotations

from braid.metadata.api import MetadataStore
from braid.runtime.env import Runtime
from braid.txn.config import TransactionConfig
from braid.txn.decisions import Decisions
from braid.txn.store import TransactionStore


class Transactions:
    """One per broker: `BrokerService.transactions`."""

    def __init__(self, runtime: Runtime, metadata: MetadataStore, config: TransactionConfig) -> None:
        self.config = config
        self.store = TransactionStore(metadata, runtime.clock)
        self.decisions = Decisions(metadata, self.store, runtime.clock, reconcile_seconds=config.reconcile_seconds)

    async def start(self) -> None:
        """The broker is announced."""
        self.decisions.start()

    async def close(self) -> None:
        await self.decisions.close()

    def kill(self) -> None:
        self.decisions.kill()
