"""`IndividualAcks`: the messages of one lane that were acknowledged one by one, until they are sent.

Owns which messages of a batch are still open, and what of that the broker has not been told. An application mostly goes through
a batch in its order: neighbours are noted as a run and become a mask once, not at each message. Sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from braid.client.messages import MessageId
from braid.model.ackset import full

MAX_OPEN: Final = 10_000
"""Batches of which it is remembered here what is open in them."""


class IndividualAcks:
    """See the module."""

    __slots__ = ("_open", "_run", "_run_end", "_unsent")

    def __init__(self) -> None:
        self._unsent: dict[tuple[int, int], int] = {}
        """Entry -> mask of what is still open in it."""
        self._open: dict[tuple[int, int], int] = {}
        """The same for every batch of which something is acknowledged, but not all, as far as that is known here: the rest of
        it may go to others. Brokers know better, so the oldest are forgotten when there are many (INV17)."""
        self._run: MessageId | None = None
        """The first of neighbours that were acknowledged in order."""
        self._run_end = -1
        """Index behind the last one of them."""

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return self._run is not None or bool(self._unsent)

    def extends_run(self, message_id: MessageId) -> bool:
        """Add a message if it follows the last one in its batch; says whether it did."""
        run = self._run
        if (
            run is None
            or message_id.batch_index != self._run_end
            or message_id.entry_id != run.entry_id
            or message_id.ledger_id != run.ledger_id
        ):
            return False
        self._run_end += 1
        return True

    def add(self, message_id: MessageId) -> None:
        """Add a message; if it is in a batch, it begins another run."""
        self._end_run()
        if message_id.batch_index < 0:
            self._unsent[message_id.ledger_id, message_id.entry_id] = 0
        else:
            self._run, self._run_end = message_id, message_id.batch_index + 1

    def add_entries(self, positions: Iterable[tuple[int, int]]) -> None:
        """Add whole entries."""
        for position in positions:
            self._unsent[position] = 0

    def take(self) -> dict[tuple[int, int], int]:
        """What is to be sent: entry -> mask of what is still open in it. It counts as sent."""
        self._end_run()
        unsent, self._unsent = self._unsent, {}
        return unsent

    def put_back(self, acks: dict[tuple[int, int], int]) -> None:
        """These may not have arrived and are to be sent again."""
        for position, mask in acks.items():
            self._unsent[position] = self._unsent.get(position, -1) & mask

    def forget_batches(self) -> None:
        """Everything open comes again, and says itself what is open in it."""
        self._end_run()
        self._open.clear()

    def clear(self) -> None:
        """Send nothing of what is not sent yet."""
        self._end_run()
        self._unsent.clear()

    def _end_run(self) -> None:
        run = self._run
        if run is None:
            return
        self._run = None
        position = run.ledger_id, run.entry_id
        mask = self._open.get(position)
        if mask is None:
            mask = full(run.batch_size)
        still_open = mask & ~(full(self._run_end) & ~full(run.batch_index))
        if still_open:
            if len(self._open) >= MAX_OPEN and position not in self._open:
                del self._open[next(iter(self._open))]
            self._open[position] = still_open
        else:
            self._open.pop(position, None)
        waiting = self._unsent.get(position)  # one that waits for a connection knows of others
        self._unsent[position] = still_open if waiting is None else waiting & still_open
