"""What pending acknowledgments keep in memory for each transaction, and whom they tell. Owns shapes, no rules."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Protocol

from braid.errors import BraidError
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.txn.ack_conflicts import Hold
from braid.txn.api import Ack
from braid.txn.records import TxnHeader


class AckListener(Protocol):
    """Who delivers the entries."""

    def held(self, holds: Sequence[Hold]) -> None:
        """These are held from now on: they are not to be delivered."""
        ...

    def settled(self, acknowledged: Sequence[Position], released: Sequence[Position]) -> None:
        """These are not held any more: some are acknowledged, the others (or some messages of them) are to be delivered again.
        A cumulative hold is named by its last entry."""
        ...


class AckRequest:
    """One acknowledgment that waits for its answer."""

    __slots__ = ("acks", "done", "held", "is_cumulative", "since", "txn", "unwritten")

    def __init__(self, txn: TxnId, acks: Sequence[Ack], since: float, *, is_cumulative: bool) -> None:
        self.txn = txn
        self.acks = acks
        self.since = since
        """When it came, on the monotonic clock."""
        self.is_cumulative = is_cumulative
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())  # who asked may be gone
        self.held: list[Hold] = []
        """What it added to the holds."""
        self.unwritten: dict[int, None] = {}
        """Numbers of the acknowledgments that need an op."""


class AckRoot:
    """What is known here of one transaction with its sub-transactions."""

    __slots__ = (
        "accepted",
        "header",
        "is_accepting",
        "is_decided",
        "is_doubtful",
        "is_restoring",
        "queue",
        "since_ms",
        "txns",
        "worker",
    )

    def __init__(self, since_ms: int) -> None:
        self.queue: list[AckRequest] = []
        self.worker: asyncio.Task[None] | None = None
        self.is_accepting = False
        """Its task is between the first op of a group and the answer."""
        self.accepted: dict[str, None] = {}
        """Keys of the ops that count."""
        self.txns: dict[TxnId, None] = {}
        self.is_decided = False
        self.header: TxnHeader | None = None
        """Once decided; None: there is none."""
        self.is_doubtful = False
        """Something is held that was refused, because its op may be in the store or on its way there."""
        self.is_restoring = False
        """A new owner does not know all of its ops yet."""
        self.since_ms = since_ms


def answer(group: Iterable[AckRequest], why: BraidError | None) -> None:
    """Tell those who were not told yet."""
    for request in group:
        if not request.done.done():
            if why is None:
                request.done.set_result(None)
            else:
                request.done.set_exception(why)
