"""How transactions and sinks are shown to people: a line each in lists, everything of one in `describe`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from braid.cli.admin_output import pairs, table
from braid.cli.scalable_output import age
from braid.client.admin_transaction_types import SinkInfo, TransactionAcks, TransactionInfo, TransactionWrites

if TYPE_CHECKING:
    from rich.console import RenderableType

SHOWN = 3
"""Things that a line of a list names; `describe` has all of them."""


def list_parts(found: Sequence[TransactionInfo]) -> Iterator[RenderableType]:
    """Open transactions by age, a line each."""
    rows = [
        (
            each.transaction,
            age(each.age_ms),
            age(each.deadline_ms - each.created_ms - each.age_ms),
            each.owner,
            _count(sum(one.entries for one in each.writes), each),
            _count(sum(map(_held, each.acks)), each),
            _summary([*map(_written, each.writes), *map(_acknowledged, each.acks)]),
        )
        for each in found
    ]
    yield table(("transaction", "open for", "time left", "owner", "entries", "acks", "holds back"), rows)


def describe_parts(found: TransactionInfo) -> Iterator[RenderableType]:
    """One transaction with everything that is not settled yet."""
    rows: list[tuple[str, Any]] = [
        ("transaction", found.transaction),
        ("state", _state(found)),
        ("begun", _time(found.created_ms)),
    ]
    if found.is_open:
        left = found.deadline_ms - found.created_ms - found.age_ms
        rows += [("open for", age(found.age_ms)), ("aborted at", f"{_time(found.deadline_ms)} (in {age(left)})")]
    elif found.finalized_ms is not None:
        rows += [("decided", _time(found.finalized_ms)), ("was open for", age(found.finalized_ms - found.created_ms))]
    rows += [("coordinator", found.most_bits), ("owner", found.owner)]
    if found.is_decider:
        rows.append(("winners", found.winners))
    if found.sink is not None:
        rows += [("sink", found.sink), ("batch", found.batch), ("run", found.run)]
    rows.append(("not settled yet", _count(found.operations, found)))
    yield pairs(rows)
    held: list[TransactionWrites | TransactionAcks] = [*found.writes, *found.acks]
    has_subs = any(any(each.sub_transactions) for each in held)
    more = ("sub-transactions",) if has_subs else ()
    if found.writes:
        lines = [(each.topic, each.entries, each.floor, *_subs(each, has_subs)) for each in found.writes]
        yield table(("topic", "entries", "readers wait after", *more), lines, "Written")
    if found.acks:
        lines = [
            (each.topic, each.subscription, each.positions, each.cumulative, *_subs(each, has_subs)) for each in found.acks
        ]
        yield table(("topic", "subscription", "single entries", "everything up to", *more), lines, "Acknowledged")


def sink_list_parts(found: Sequence[SinkInfo]) -> Iterator[RenderableType]:
    """Sinks, a line each."""
    rows = [(each.sink, each.last_batch, _under_way(each), each.run, each.run_epoch, _time(each.expires_ms)) for each in found]
    yield table(("sink", "last batch", "under way", "run", "runs", "forgotten at"), rows)


def sink_parts(found: SinkInfo) -> Iterator[RenderableType]:
    """One sink in full."""
    current = found.current
    rows: list[tuple[str, Any]] = [("sink", found.sink), ("last batch in the output", found.last_batch)]
    if found.last_run is not None:
        rows.append(("written by the run", found.last_run))
    if current is not None:
        rows.append(("begun last", f"batch {current.batch}, transaction {current.transaction}, {current.state.lower()}"))
    rows += [
        ("run", found.run),
        ("runs so far", found.run_epoch),
        ("retired runs", found.retired_runs),
        ("owner", found.owner),
        ("forgotten at", f"{_time(found.expires_ms)}, unless it is used before"),
    ]
    yield pairs(rows)


def _under_way(found: SinkInfo) -> str | None:
    if found.current is None or found.current.state != "OPEN":
        return None
    return f"batch {found.current.batch} in {found.current.transaction}"


def _state(found: TransactionInfo) -> str:
    if found.is_open or not found.operations:
        return found.state.lower()
    return f"{found.state.lower()}, and being settled where it wrote and acknowledged"


def _count(number: int, of: TransactionInfo) -> Any:
    return number if of.is_complete else f"{number} or more"


def _held(acks: TransactionAcks) -> int:
    return acks.positions + (acks.cumulative is not None)


def _written(writes: TransactionWrites) -> str:
    return f"{writes.topic} after {writes.floor}"


def _acknowledged(acks: TransactionAcks) -> str:
    return f"{acks.subscription} of {acks.topic}"


def _summary(texts: Sequence[str]) -> str:
    rest = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return (", ".join(texts[:SHOWN]) + rest) or "nothing yet"


def _subs(held: TransactionWrites | TransactionAcks, has_subs: bool) -> tuple[Any, ...]:
    return (held.sub_transactions,) if has_subs else ()


def _time(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms"
