"""Settings of a one-process broker: one section per component, gathered for the TOML file and the reference page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from braid.broker.config import BrokerConfig, RetentionConfig
from braid.ledger.config import LocalSettings
from braid.managedledger.config import ManagedLedgerConfig
from braid.runtime.config import setting
from braid.runtime.logs import LogSettings
from braid.scalable.config import ScalableConfig
from braid.txn.config import TransactionConfig


class StorageConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[storage]`."""

    data_dir: Annotated[str, setting("Directory of everything that must survive a restart")] = "data"
    metadata_backend: Annotated[str, setting("Metadata store: embedded, memory, or the name of a plug-in")] = "embedded"
    ledger_backend: Annotated[str, setting("Ledger store: local, memory, or the name of a plug-in")] = "local"
    session_timeout_seconds: Annotated[float, setting("Life of a metadata session without a heartbeat", ge=1, le=3600)] = 10.0

    @property
    def path(self) -> Path:
        return Path(self.data_dir)


class LogConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[log]`."""

    level: Annotated[Literal["debug", "info", "warning", "error"], setting("Least severe events that are logged")] = "info"
    json: Annotated[bool, setting("One JSON object per line instead of text")] = False

    @property
    def settings(self) -> LogSettings:
        return LogSettings(level=self.level, json=self.json)


class StandaloneConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Every section of `braid standalone`."""

    broker: BrokerConfig = BrokerConfig()
    storage: StorageConfig = StorageConfig()
    ledger: LocalSettings = LocalSettings()
    managed_ledger: ManagedLedgerConfig = ManagedLedgerConfig()
    retention: RetentionConfig = RetentionConfig()
    scalable_topics: ScalableConfig = ScalableConfig()
    transactions: TransactionConfig = TransactionConfig()
    log: LogConfig = LogConfig()
