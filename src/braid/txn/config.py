"""Settings of transactions, section `[transactions]`; every bound a client can feel is here (INV17)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from braid.runtime.config import setting


class TransactionConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[transactions]`."""

    enabled: Annotated[bool, setting("Whether transactions can be begun and used", alias="transactionCoordinatorEnabled")] = (
        True
    )
    coordinators: Annotated[
        int,
        setting(
            "Coordinator partitions; fixed when the first broker starts",
            ge=1,
            le=1024,
            alias="transactionCoordinatorScalableTopicsParallelism",
        ),
    ] = 16
    max_timeout_seconds: Annotated[float, setting("Longest time a transaction may ask for", ge=1, le=31_536_000)] = 86_400.0
    max_open_per_coordinator: Annotated[
        int,
        setting(
            "Open transactions of one coordinator partition",
            ge=1,
            le=10_000_000,
            alias="maxActiveTransactionsPerCoordinator",
        ),
    ] = 10_000
    max_waiting_per_producer: Annotated[
        int, setting("Messages of one producer that wait behind a transactional one", ge=1, le=1_000_000)
    ] = 5_000
    timeout_sweep_seconds: Annotated[
        float,
        setting(
            "How often transactions past their deadline are aborted",
            ge=0.01,
            le=3600,
            alias="transactionCoordinatorScalableTopicsTimeoutSweepIntervalSeconds",
        ),
    ] = 1.0
    collect_seconds: Annotated[
        float,
        setting(
            "How often finished transactions are collected",
            ge=0.01,
            le=86_400,
            alias="transactionCoordinatorScalableTopicsGcIntervalSeconds",
        ),
    ] = 30.0
    retention_seconds: Annotated[
        float,
        setting(
            "How long the outcome of a finished transaction can be asked for, at least",
            ge=0,
            le=31_536_000,
            alias="transactionCoordinatorScalableTopicsGcRetentionSeconds",
        ),
    ] = 60.0
    sink_retention_seconds: Annotated[
        float,
        setting(
            "How long it is remembered which batches a sink has, since the last one; what comes again later is written again",
            ge=60,
            le=315_360_000,
        ),
    ] = 2_592_000.0
    reconcile_seconds: Annotated[
        float, setting("How often held transactions are compared with the metadata store", ge=0.01, le=3600)
    ] = 1.0
