"""What the admin API says of transactions and sinks, as types. Unknown fields are ignored. Pure."""

from __future__ import annotations

import msgspec


class _Answer(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A JSON object of the admin API."""


class TransactionWrites(_Answer, frozen=True):
    """What a transaction wrote to one segment or topic and has not settled there yet."""

    topic: str
    """Full name: `segment://...` or `persistent://...`."""
    entries: int = 0
    """Entries it was allowed to write; a batch of messages is one."""
    floor: str = ""
    """Position (`ledger:entry`) before its first entry: while it is open, nobody reads beyond it."""
    sub_transactions: list[int] = []
    """Numbers of the sub-transactions that wrote; 0 is the transaction itself."""


class TransactionAcks(_Answer, frozen=True):
    """What a transaction acknowledged in one subscription and has not settled there yet."""

    topic: str
    subscription: str
    positions: int = 0
    """Single entries, whole or in part."""
    cumulative: str | None = None
    """Position up to which it acknowledged everything."""
    sub_transactions: list[int] = []


class TransactionInfo(_Answer, frozen=True):
    """A transaction and what it holds back."""

    transaction: str
    """`{most}_{least}`."""
    most_bits: int
    """Its coordinator partition."""
    least_bits: int
    state: str
    """OPEN, COMMITTED or ABORTED."""
    created_ms: int = 0
    age_ms: int = 0
    """Since it was begun."""
    deadline_ms: int = 0
    """When it is aborted if it is still open."""
    finalized_ms: int | None = None
    """When it was decided."""
    owner: str | None = None
    """Who began it, if that is known."""
    is_decider: bool = False
    """Has sub-transactions."""
    winners: list[int] = []
    """Of a committed decider: the sub-transactions that count."""
    sink: str | None = None
    """Of a decider that holds a batch of a sink: which sink, which batch, which run of the job."""
    batch: int | None = None
    run: str | None = None
    operations: int = 0
    """Writes and acknowledgments that are not settled yet; 0 of a finished one: nothing is left to do."""
    is_complete: bool = True
    """Whether all of them were looked at; else there are more than are counted here."""
    writes: list[TransactionWrites] = []
    acks: list[TransactionAcks] = []

    @property
    def is_open(self) -> bool:
        return self.state == "OPEN"


class SinkBatchInfo(_Answer, frozen=True):
    """The batch that a sink was asked to take last."""

    batch: int
    transaction: str
    """Its decider, as `braid transactions describe` takes it."""
    state: str
    """OPEN, COMMITTED or ABORTED."""


class SinkInfo(_Answer, frozen=True):
    """Which batches of a job are in its output, and which run of it may write the next."""

    sink: str
    last_batch: int | None = None
    """The highest batch that is in the output."""
    last_run: str | None = None
    """The run that wrote it."""
    current: SinkBatchInfo | None = None
    """What was begun last, unless that is settled for good."""
    run: str = ""
    """The run that has the sink."""
    run_epoch: int = 0
    """How many runs have had it."""
    retired_runs: list[str] = []
    """Runs that lost it to a later one and can write no more, the latest last."""
    owner: str | None = None
    """Who began it, if that is known."""
    expires_ms: int = 0
    """When it is forgotten unless it is used before."""
