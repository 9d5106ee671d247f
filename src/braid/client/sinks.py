"""`Sinks`: the client's side of exactly-once output: begin a batch, decide it, abort it, ask what is there.

A sink takes numbered batches from a job, each once, however often the job is started again and its tasks are repeated. Keeps
nothing: everything is in the brokers' records, so that tasks and driver can be in different processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from braid.client.consumer_origin import checked_text
from braid.client.coordinators import PASSING
from braid.client.deciders import Decider, decider_id, numbers_of
from braid.client.transactions import milliseconds_of
from braid.errors import (
    BraidError,
    DeadlineExceeded,
    InvalidArgument,
    InvalidTransactionStatus,
    ProducerFenced,
    SinkFenced,
    TransactionNotFound,
)
from braid.model.txn import TxnId
from braid.wire import sink_requests, txn_requests
from braid.wire.types import TxnAction

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.coordinators import Coordinators

MAX_BATCH = (1 << 63) - 1


class SinkBegin(msgspec.Struct, frozen=True):
    """What `Client.begin_sink` gives."""

    decider: Decider | None
    """Under whose sub-transactions the batch is written; None of a duplicate."""
    is_duplicate: bool
    """The batch is in the output: nothing is to be written."""


class SinkCurrent(msgspec.Struct, frozen=True):
    """A batch that is under way."""

    batch: int
    run: str
    txn: TxnId


class SinkState(msgspec.Struct, frozen=True):
    """How a sink stands."""

    sink: str
    last: int | None
    """The highest batch that is in the output."""
    current: SinkCurrent | None
    """The one that is begun and not decided."""
    last_run: str | None = None
    """The run that wrote the last batch."""

    def has(self, batch: int) -> bool:
        """Whether the output has this batch. That a later one is under way says nothing: it may be of another job."""
        return self.last is not None and self.last >= batch


class Sinks:
    """Of one client."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def begin(self, sink: str, batch: int, run: str, timeout: float) -> SinkBegin:
        name, number, of_run, ttl_ms = _sink(sink), _batch(batch), checked_text("run", run), milliseconds_of(timeout)
        coordinator = await self._coordinators().of(name)
        try:
            body = await self._ask(coordinator, lambda request: sink_requests.begin(request, name, number, of_run, ttl_ms))
        except ProducerFenced as error:
            raise SinkFenced(error.message) from error
        if body.is_duplicate:
            return SinkBegin(None, True)
        return SinkBegin(Decider(self._client, _txn(body), is_joined=True), False)

    async def state(self, sink: str) -> SinkState | None:
        name = _sink(sink)
        body = await self._ask(await self._coordinators().of(name), lambda request: sink_requests.get(request, name))
        last = body.last_batch if body.HasField("last_batch") else None
        current = SinkCurrent(body.current_batch, body.current_run, _txn(body)) if body.HasField("current_batch") else None
        return None if last is None and current is None else SinkState(name, last, current, body.last_run or None)

    async def decide(
        self, sink: str, batch: int, run: str, txn: TxnId | str, winners: Iterable[int]
    ) -> Literal["COMMITTED", "DUPLICATE"]:
        name, number, of_run, root, chosen = (
            _sink(sink),
            _batch(batch),
            checked_text("run", run),
            decider_id(txn),
            numbers_of(winners),
        )
        try:
            await self._ask(root.most, lambda request: txn_requests.decide(request, root, chosen))
        except (InvalidTransactionStatus, TransactionNotFound) as error:
            state = await self.state(name)
            if state is not None and state.has(number):
                return "DUPLICATE"
            if state is not None and state.current is not None and state.current.run != of_run:
                raise SinkFenced(
                    f"Batch {number} of the sink {name} was not written by this run: the run {state.current.run}, which was "
                    f"started later, has the sink and aborted transaction {root}. Stop one of the two jobs."
                ) from error
            raise InvalidTransactionStatus(
                f"Batch {number} of the sink {name} is not in the output: its transaction {root} was aborted, by its deadline, "
                f"another run or an administrator. Start the job again, which writes the batch anew. ({error.message})"
            ) from error
        except (DeadlineExceeded, *PASSING) as error:
            raise _unknown(name, number, root, error) from error
        return "COMMITTED"

    async def abort(self, txn: TxnId | str) -> None:
        root = decider_id(txn)
        try:
            await self._ask(root.most, lambda request: txn_requests.end(request, root, TxnAction.ABORT))
        except (InvalidTransactionStatus, TransactionNotFound):
            return

    def _coordinators(self) -> Coordinators:
        coordinators = self._client.coordinators
        self._client.keep(coordinators)
        return coordinators

    async def _ask(self, coordinator: int, build: Callable[[int], bytes]) -> Any:
        deadline = self._client.runtime.clock.monotonic() + self._client.config.operation_timeout
        return await self._coordinators().ask(coordinator, build, deadline)


def _sink(sink: Any) -> str:
    return checked_text("sink", sink)


def _batch(batch: Any) -> int:
    if not isinstance(batch, int) or isinstance(batch, bool) or not 0 <= batch <= MAX_BATCH:
        raise InvalidArgument(f"batch={batch!r:.100} cannot be a batch of a sink; they are numbered from 0 to {MAX_BATCH}.")
    return batch


def _txn(body: Any) -> TxnId:
    return TxnId(body.txnid_most_bits, body.txnid_least_bits)


def _unknown(sink: str, batch: int, root: TxnId, error: BraidError) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"Whether batch {batch} of the sink {sink} is in the output is not known, because no broker could tell ({error}); "
        f"decide transaction {root} again, or start the job again: it asks before it writes."
    )
