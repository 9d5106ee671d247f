"""`MetadataTransactionBuffer` over a log that is only positions: order of the steps, outcomes, recovery, several owners."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec
import pytest
from tests.unit.txn.coordination_bench import SEGMENT, Bench, brokers

from braid.errors import LedgerFenced, StoreError, TransactionConflict
from braid.model.positions import LATEST, Position
from braid.model.txn import TxnId
from braid.runtime.plans import watching
from braid.runtime.tasks import Tasks
from braid.testing.faulty_metadata import Fault
from braid.txn import buffer
from braid.txn.buffer import MetadataTransactionBuffer
from braid.txn.decisions import Decisions
from braid.txn.held_writes import WritePermit
from braid.txn.records import AbortedTxn, text_position
from braid.txn.store import Header, StoredOp


class Entry(NamedTuple):
    ledger_id: int
    entry_id: int
    txn: tuple[int, int] | None


class Log:
    """One ledger in memory. It has nothing to read with, so that nothing can be read (R473-26)."""

    def __init__(self, incarnation: str = "a1") -> None:
        self.incarnation = incarnation
        self.entries: list[TxnId | None] = []
        self.first = 0
        self.is_in_doubt = False
        self.owner: object = None

    @property
    def first_position(self) -> Position:
        return Position(7, self.first)

    @property
    def last_position(self) -> Position:
        return Position(7, len(self.entries) - 1)

    def position_before(self, position: Position) -> Position:
        return Position(7, position.entry_id - 1)


class Owner:
    """A buffer of one owner of the log; the last one made is the real one."""

    def __init__(self, bench: Bench, log: Log) -> None:
        self.bench = bench
        self.log = log
        log.owner = self
        self.tasks = Tasks("owner")
        self.decisions = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=1)
        self.readable = 0
        self.buffer = MetadataTransactionBuffer(SEGMENT, self, bench.store, self.decisions, bench.clock, self.tasks, self._more)

    def _more(self) -> None:
        self.readable += 1

    # The port: the log as this owner sees it.

    @property
    def incarnation(self) -> str:
        return self.log.incarnation

    @property
    def first_position(self) -> Position:
        return self.log.first_position

    @property
    def last_position(self) -> Position:
        return self.log.last_position

    @property
    def is_in_doubt(self) -> bool:
        return self.log.is_in_doubt

    def position_before(self, position: Position) -> Position:
        return self.log.position_before(position)

    async def check_owner(self) -> None:
        if self.log.owner is not self:
            raise LedgerFenced("Another owner took over.")

    # What a producer and a log do.

    async def append(self, txn: TxnId | None, count: int = 1) -> None:
        """Write entries that become durable at once."""
        permit: WritePermit | None = None
        if txn is not None:
            permit = await self.buffer.authorise(txn, count)
        if self.log.owner is not self:
            if permit is not None:
                await self.buffer.appended(permit, 0)
            return
        first = len(self.log.entries)
        self.log.entries += [txn] * count
        if permit is not None:
            await self.buffer.appended(permit, count)
        self.buffer.added([Entry(7, first + number, txn) for number in range(count)])

    def visible(self) -> list[int]:
        """Entries that may be read."""
        limit = self.buffer.max_read_position
        return [
            number
            for number, txn in enumerate(self.log.entries)
            if Position(7, number) <= limit and not (txn is not None and self.buffer.is_aborted(txn))
        ]

    async def settle(self) -> None:
        for _ in range(5):
            await self.bench.world.advance(1)

    async def close(self) -> None:
        self.buffer.close()
        await self.tasks.close()
        await self.decisions.close()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


@pytest.fixture
async def rivals() -> AsyncIterator[tuple[Bench, Bench]]:
    """Two brokers, each with its own link to the store."""
    async with brokers(2) as (one, two):
        yield one, two


@pytest.fixture
async def owner(bench: Bench) -> AsyncIterator[Owner]:
    made = Owner(bench, Log())
    made.decisions.start()
    yield made
    await made.close()


async def aborted(bench: Bench) -> dict[TxnId, str]:
    return {txn: value.last async for txn, value in bench.store.aborted_in(SEGMENT)}


@pytest.mark.inv("INV10", "INV11")
async def test_the_op_comes_first_then_the_header_then_the_entry(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    seen: list[tuple[str, str, int]] = []

    async def hook(name: str, moment: str) -> None:
        seen.append((name, moment, len(await bench.store.writes_in(SEGMENT))))

    with watching(hook):
        await owner.append(txn)
    assert seen == [
        ("txn-write:op", "before", 0),
        ("txn-write:op", "after", 1),
        ("txn-write:header", "before", 1),
        ("txn-write:header", "after", 1),
    ]
    (op,) = await bench.store.writes_in(SEGMENT)
    assert (op.op.position, op.op.incarnation, op.op.entries) == ("7:-1", "a1", 1)


@pytest.mark.req("R473-41")
@pytest.mark.parametrize("end", ["commit", "abort", "none"])
async def test_a_transaction_that_is_not_open_is_refused_and_leaves_no_op(bench: Bench, owner: Owner, end: str) -> None:
    txn = TxnId.of(4, 4) if end == "none" else await bench.begin()
    if end != "none":
        await bench.coordinator.end(txn, commit=end == "commit")
    with pytest.raises(TransactionConflict, match=str(txn)):
        await owner.buffer.authorise(txn, 3)
    assert await bench.store.writes_in(SEGMENT) == []
    await owner.settle()
    assert owner.buffer.in_flight == 0 and not owner.buffer._held and owner.decisions.held == 0


@pytest.mark.req("R473-3", "R473-24")
async def test_positions_are_exact_while_the_entries_are_in_memory(bench: Bench, owner: Owner) -> None:
    one, two = await bench.begin(), await bench.begin(1)
    permit = await owner.buffer.authorise(one, 1)
    await owner.append(None, 5)  # confirmed before the transactional one
    assert owner.visible() == [0, 1, 2, 3, 4]  # nothing is pinned by a permit
    owner.log.entries.append(one)
    await owner.buffer.appended(permit, 1)
    owner.buffer.added([Entry(7, 5, one)])
    await owner.append(two, 2)
    await owner.append(None)
    assert owner.buffer.max_read_position == Position(7, 4)
    await bench.coordinator.end(one, commit=True)
    await owner.settle()
    assert owner.visible() == [0, 1, 2, 3, 4, 5] and owner.readable == 1
    await bench.coordinator.end(two, commit=False)
    await owner.settle()
    assert owner.visible() == [0, 1, 2, 3, 4, 5, 8]
    assert await aborted(bench) == {two: "7:7"}
    assert await bench.store.writes_in(SEGMENT) == []


async def test_nothing_is_held_of_entries_the_log_did_not_take(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    permit = await owner.buffer.authorise(txn, 3)
    await owner.buffer.appended(permit, 0)
    assert await bench.store.writes_in(SEGMENT) == []
    await owner.settle()
    assert owner.buffer.in_flight == 0 and owner.buffer.open_transactions() == [] and owner.decisions.held == 0


@pytest.mark.req("R473-2")
async def test_an_op_without_entries_keeps_its_segment_too(bench: Bench) -> None:
    """Whoever deletes a segment aborts the transactions that have write ops there, entries or not."""
    log = Log()
    first = Owner(bench, log)
    await first.append(None)
    txn = await bench.begin()
    await first.buffer.authorise(txn, 1)
    assert first.buffer.undecided == 1
    await first.close()  # before the append
    second = Owner(bench, log)
    second.decisions.start()
    await second.buffer.recover()
    assert second.visible() == [0] and second.buffer.open_transactions() == []
    assert second.buffer.undecided == 1
    await bench.coordinator.end(txn, commit=True)
    await second.settle()
    assert second.buffer.undecided == 0
    await second.close()


@pytest.mark.inv("INV10", "INV13")
async def test_an_op_stays_if_the_log_took_some_of_its_entries(bench: Bench) -> None:
    log = Log()
    first = Owner(bench, log)
    txn = await bench.begin()
    permit = await first.buffer.authorise(txn, 3)
    log.entries.append(txn)
    await first.buffer.appended(permit, 1)
    first.buffer.added([Entry(7, 0, txn)])
    assert first.buffer.in_flight == 0
    await first.close()
    second = Owner(bench, log)
    second.decisions.start()
    await second.buffer.recover()
    assert second.visible() == []
    await bench.coordinator.end(txn, commit=False)
    await second.settle()
    assert second.visible() == []
    assert await aborted(bench) == {txn: "7:0"}
    await second.close()


@pytest.mark.inv("INV12")
@pytest.mark.parametrize("is_in_doubt", [True, False])
async def test_a_failed_append_is_pinned_at_its_floor_while_it_may_be_stored(
    bench: Bench, owner: Owner, is_in_doubt: bool
) -> None:
    await owner.append(None)
    txn = await bench.begin()
    permit = await owner.buffer.authorise(txn, 1)
    await owner.append(None)
    await owner.buffer.appended(permit, 1)
    owner.log.is_in_doubt = is_in_doubt
    owner.buffer.failed([txn])
    assert owner.buffer.in_flight == 0
    assert owner.visible() == ([0] if is_in_doubt else [0, 1])
    owner.log.entries += [txn] * is_in_doubt  # so it was stored
    await owner.append(None)
    assert owner.visible() == ([0] if is_in_doubt else [0, 1, 2])
    await bench.coordinator.end(txn, commit=False)
    await owner.settle()
    assert owner.visible() == ([0, 1, 3] if is_in_doubt else [0, 1, 2])
    # As long as nobody knows where the log ends, nothing says how far the aborted entries may reach.
    assert await aborted(bench) == {}
    assert len(await bench.store.writes_in(SEGMENT)) == is_in_doubt
    owner.log.is_in_doubt = False
    await owner.settle()
    await owner.settle()
    assert await aborted(bench) == ({txn: "7:3"} if is_in_doubt else {})
    assert await bench.store.writes_in(SEGMENT) == []


@pytest.mark.inv("INV12", "INV13")
async def test_an_aborted_record_reaches_entries_that_were_stored_after_the_known_ones(bench: Bench, owner: Owner) -> None:
    """The last entry known of a transaction is not its last one if a later append ended in doubt; a record that ends with the
    known one would be pruned too early, and the other would be shown."""
    txn = await bench.begin()
    await owner.append(txn)
    permit = await owner.buffer.authorise(txn, 1)
    await owner.buffer.appended(permit, 1)
    owner.log.is_in_doubt = True
    owner.buffer.failed([txn])
    owner.log.entries.append(txn)  # so it was stored
    owner.log.is_in_doubt = False
    await bench.coordinator.end(txn, commit=False)
    await owner.settle()
    assert await aborted(bench) == {txn: "7:1"}
    owner.log.first = 1  # the known one is trimmed
    owner.buffer.prune()
    await owner.settle()
    assert owner.visible() == []
    assert await aborted(bench) == {txn: "7:1"}


@pytest.mark.inv("INV15")
async def test_an_outcome_is_found_without_any_notification(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    bench.faulty.faults.watch_drop = 1.0
    await owner.append(txn)
    await bench.coordinator.end(txn, commit=True)
    await bench.world.advance(1.1)
    await bench.world.advance(0)
    assert owner.visible() == [0]


@pytest.mark.req("R473-26")
@pytest.mark.inv("INV2", "INV13")
async def test_a_new_owner_holds_hides_and_shows_as_the_records_say(bench: Bench) -> None:
    log = Log()
    first = Owner(bench, log)
    await first.append(None)
    committed, gone, still_open, foreign = [await bench.begin() for _ in range(4)]
    for txn in (committed, gone, still_open):
        await first.append(txn)
    await first.append(None)
    await first.close()
    await bench.coordinator.end(committed, commit=True)
    await bench.coordinator.end(gone, commit=False)
    (template,) = [op.op for op in await bench.store.writes_in(SEGMENT) if op.txn == gone]
    await bench.store.append_op(foreign, msgspec.structs.replace(template, incarnation="other"))
    await bench.store.append_op(TxnId.of(9, 9), template)
    await bench.store.put_aborted(SEGMENT, foreign, AbortedTxn(last="7:9", incarnation="other"))
    second = Owner(bench, log)
    await second.buffer.recover()
    # Before anything is materialised.
    assert second.visible() == [0, 1] and second.buffer.max_read_position == Position(7, 2)
    assert second.buffer.is_aborted(gone) and not second.buffer.is_aborted(foreign)
    second.decisions.start()
    await second.settle()
    assert {op.txn for op in await bench.store.writes_in(SEGMENT)} == {still_open}
    assert await aborted(bench) == {gone: "7:4"}
    await bench.coordinator.end(still_open, commit=True)
    await second.settle()
    assert second.visible() == [0, 1, 3, 4] and second.buffer.max_read_position == LATEST
    assert await bench.store.writes_in(SEGMENT) == []
    await second.close()


@pytest.mark.inv("INV2")
async def test_one_that_lost_the_log_while_it_loads_takes_nothing_over(bench: Bench) -> None:
    log = Log()
    first = Owner(bench, log)
    await first.append(await bench.begin())
    stale = Owner(bench, log)
    log.owner = first
    with pytest.raises(LedgerFenced):
        await stale.buffer.recover()
    assert len(await bench.store.writes_in(SEGMENT)) == 1
    await stale.close()
    await first.close()


@pytest.mark.inv("INV2")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_new_owner_reads_headers_afresh(bench: Bench, commit: bool) -> None:
    """Its copy of the store may be behind, and an op whose header is gone counts for nothing."""
    log = Log()
    first = Owner(bench, log)
    txn = await bench.begin()
    await first.append(txn)
    await first.close()
    read = bench.store.header

    async def behind(root: TxnId, *, fresh: bool = False) -> Header | None:
        return await read(root, fresh=True) if fresh else None

    bench.store.header = behind  # type: ignore[method-assign]
    second = Owner(bench, log)
    second.decisions.start()
    await second.buffer.recover()
    await second.settle()
    assert second.visible() == []
    await bench.coordinator.end(txn, commit=commit)
    await second.settle()
    assert second.visible() == [0] * commit
    assert await aborted(bench) == ({} if commit else {txn: "7:0"})
    await second.close()


@pytest.mark.inv("INV2", "INV12")
@pytest.mark.parametrize("commit", [True, False])
async def test_what_is_decided_during_the_takeover_is_done_once_everything_is_known(
    bench: Bench, commit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outcome comes while half of a transaction's ops are known; it is told once."""
    log = Log()
    first = Owner(bench, log)
    txn, count = await bench.begin(), 200
    for _number in range(count):
        await first.append(txn)
    await first.close()
    monkeypatch.setattr(buffer, "RECOVERED_AT_ONCE", 1)  # so that it takes longer than materialising would
    second = Owner(bench, log)  # nobody reconciles
    take, known = second.buffer._recovered, 0

    def recovered(op: StoredOp, header: Header) -> None:
        nonlocal known
        known += 1
        if known == count // 2:
            state = "COMMITTED" if commit else "ABORTED"
            second.buffer._decided(txn, msgspec.structs.replace(header.value, state=state, finalized_ms=1))
        take(op, header)

    monkeypatch.setattr(second.buffer, "_recovered", recovered)
    await second.buffer.recover()
    assert second.visible() == list(range(count)) * commit
    async with asyncio.timeout(10):
        while second.buffer._held:  # noqa: ASYNC110 - it is a dict
            await asyncio.sleep(0)
    assert second.visible() == list(range(count)) * commit
    assert await bench.store.writes_in(SEGMENT) == []
    assert await aborted(bench) == ({} if commit else {txn: f"7:{count - 1}"})
    await second.close()


@pytest.mark.inv("INV2", "INV13")
async def test_what_a_former_owner_finishes_while_the_next_one_loads_stays_hidden(rivals: tuple[Bench, Bench]) -> None:
    """Ops are listed before aborted records are: the former owner writes the record and deletes the ops at any moment."""
    late, bench = rivals
    log = Log()
    txn = await bench.begin()
    first = Owner(late, log)
    for each in (None, txn, None):
        await first.append(each)
    await bench.coordinator.end(txn, commit=False)
    second = Owner(bench, log)
    honest = bench.store.writes_in

    async def writes_in(segment: str) -> list[StoredOp]:
        first.decisions.start()
        await first.settle()
        return await honest(segment)

    bench.store.writes_in = writes_in  # type: ignore[method-assign]
    await second.buffer.recover()
    assert second.visible() == [0, 2]
    await first.close()
    await second.close()


@pytest.mark.inv("INV12")
async def test_a_late_former_owner_does_not_lower_what_the_next_one_wrote_down(rivals: tuple[Bench, Bench]) -> None:
    late, bench = rivals
    log = Log()
    txn = await bench.begin()
    first = Owner(late, log)
    await first.append(txn)
    late.faulty.freeze()
    second = Owner(bench, log)
    second.decisions.start()
    await second.buffer.recover()
    await second.append(None, 3)
    await second.append(txn)
    await bench.coordinator.end(txn, commit=False)
    await second.settle()
    assert await aborted(bench) == {txn: "7:4"}
    late.faulty.thaw()  # it hears of the outcome only now, and knows of one entry only
    first.decisions.start()
    await first.settle()
    assert not first.buffer._held
    assert await aborted(bench) == {txn: "7:4"}
    log.first = 3  # and the record is still there when its own entry is trimmed
    first.buffer.prune()
    second.buffer.prune()
    await second.settle()
    assert await aborted(bench) == {txn: "7:4"}
    log.first = 5
    second.buffer.prune()
    await second.settle()
    assert await aborted(bench) == {} and not second.buffer.is_aborted(txn)
    await first.close()
    await second.close()


@pytest.mark.inv("INV12")
@pytest.mark.parametrize("way", ["an unknown append", "relist"])
async def test_a_late_former_owner_deletes_no_op_of_the_next_one(rivals: tuple[Bench, Bench], way: str) -> None:
    """It looks for ops that it has not heard of, and finds some that cover entries it does not know."""
    late, bench = rivals
    log = Log()
    txn = await bench.begin()
    first = Owner(late, log)
    if way == "an unknown append":
        late.faulty.plan(Fault.UNKNOWN_DROPPED, "append")
        with pytest.raises(StoreError):
            await first.append(txn)
    bench.faulty.faults.watch_drop = 1.0  # the next owner does not hear of the outcome
    second = Owner(bench, log)
    await second.buffer.recover()
    await second.append(txn)
    await bench.coordinator.end(txn, commit=False)
    if way == "relist":
        with pytest.raises(LedgerFenced):
            await first.buffer.relist()
    first.decisions.start()
    await first.settle()
    assert len(await bench.store.writes_in(SEGMENT)) == 1
    await second.close()
    third = Owner(bench, log)
    await third.buffer.recover()
    assert third.visible() == []
    await first.close()
    await third.close()


@pytest.mark.inv("INV13")
async def test_a_late_former_owner_shows_nothing_whose_header_is_gone(rivals: tuple[Bench, Bench]) -> None:
    """The next owner has dealt with it, and only that one knows the outcome."""
    late, bench = rivals
    log = Log()
    txn = await bench.begin()
    first = Owner(late, log)
    late.faulty.faults.watch_drop = 1.0
    await first.append(txn)
    second = Owner(bench, log)
    second.decisions.start()
    await second.buffer.recover()
    await bench.coordinator.end(txn, commit=False)
    await second.settle()
    assert await bench.store.writes_in(SEGMENT) == []
    await bench.store.delete_header(await bench.header(txn))
    first.decisions.start()
    await first.settle()
    assert first.visible() == [] and first.readable == 0
    await first.close()
    await second.close()


@pytest.mark.inv("INV12", "INV13")
async def test_a_record_of_a_late_former_owner_is_made_to_reach_as_far_as_the_ops(rivals: tuple[Bench, Bench]) -> None:
    """It knows nothing of the next owner's entries, and the next owner ends before it has written anything down."""
    late, bench = rivals
    log = Log()
    txn = await bench.begin()
    first = Owner(late, log)
    await first.append(txn)
    bench.faulty.faults.watch_drop = 1.0
    second = Owner(bench, log)
    await second.buffer.recover()
    await second.append(None, 3)
    await second.append(txn)
    await bench.coordinator.end(txn, commit=False)
    first.decisions.start()
    await first.settle()
    assert await aborted(bench) == {txn: "7:0"}
    await second.close()
    third = Owner(bench, log)
    await third.buffer.recover()
    third.decisions.start()
    await third.settle()
    assert await aborted(bench) == {txn: "7:4"}
    assert await bench.store.writes_in(SEGMENT) == []
    log.first = 3
    third.buffer.prune()
    await third.settle()
    assert third.visible() == [1, 2, 3]
    assert third.buffer.visibility.prunable(Position(7, 5)) == [txn]
    await first.close()
    await third.close()


@pytest.mark.inv("INV5")
async def test_the_owner_of_a_deleted_log_does_not_touch_the_records_of_the_next_one(rivals: tuple[Bench, Bench]) -> None:
    late, bench = rivals
    txn = await bench.begin()
    old = Owner(late, Log("old"))
    await old.append(txn)
    late.faulty.freeze()
    new = Owner(bench, Log("new"))
    await new.append(txn, 2)
    await bench.coordinator.end(txn, commit=False)
    new.decisions.start()
    await new.settle()
    assert await aborted(bench) == {txn: "7:1"}
    old.log.owner = None
    late.faulty.thaw()
    old.decisions.start()
    await old.settle()
    assert old.buffer.is_aborted(txn)
    (value,) = [value async for _txn, value in bench.store.aborted_in(SEGMENT)]
    assert (value.last, value.incarnation) == ("7:1", "new")
    await old.close()
    await new.close()


@pytest.mark.req("R473-22")
@pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNAVAILABLE])
async def test_an_op_of_unknown_fate_is_found_when_the_transaction_ends(bench: Bench, owner: Owner, fault: Fault) -> None:
    txn = await bench.begin()
    bench.faulty.plan(fault, "append")
    with pytest.raises(StoreError):
        await owner.buffer.authorise(txn, 1)
    await owner.append(None)
    assert owner.visible() == [0] and owner.buffer.in_flight == 0
    await bench.coordinator.end(txn, commit=True)
    await owner.settle()
    assert await bench.store.writes_in(SEGMENT) == [] and owner.decisions.held == 0


@pytest.mark.req("R473-20", "R473-39")
@pytest.mark.inv("INV13")
@pytest.mark.parametrize("seed", range(25))
async def test_random_lives(seed: int) -> None:
    """Writes, outcomes, crashes and takeovers in any order: nobody ever sees an open or aborted entry, in the end everybody
    sees all others, and nothing is left in the store but the aborted records."""
    rng = random.Random(seed)
    async with brokers() as (bench,):
        log = Log()
        owners = [Owner(bench, log)]
        owners[0].decisions.start()
        open_ones: list[TxnId] = []
        states: dict[TxnId, str] = {}
        plain = 0

        def check(owner: Owner, *, complete: bool = False) -> None:
            seen = owner.visible()
            for number in seen:
                txn = log.entries[number]
                assert txn is None or states[txn] == "COMMITTED", f"entry {number} of {txn} is {states[txn]}"
            if complete:
                wanted = [n for n, txn in enumerate(log.entries) if txn is None or states[txn] == "COMMITTED"]
                assert seen == wanted

        for _turn in range(60):
            owner = owners[-1]
            action = rng.choice(["begin", "write", "write", "write", "plain", "end", "end", "crash", "stale", "time"])
            if action == "begin" or not open_ones:
                txn = await bench.begin(rng.randrange(3))
                open_ones.append(txn)
                states[txn] = "OPEN"
            elif action == "write":
                await owner.append(rng.choice(open_ones), rng.randint(1, 3))
            elif action == "plain":
                plain += 1
                await owner.append(None)
            elif action == "end":
                txn = open_ones.pop(rng.randrange(len(open_ones)))
                commit = rng.random() < 0.5
                states[txn] = "COMMITTED" if commit else "ABORTED"
                await bench.coordinator.end(txn, commit=commit)
            elif action == "crash":
                if rng.random() < 0.5:
                    await owner.close()
                successor = Owner(bench, log)
                await successor.buffer.recover()
                successor.decisions.start()
                owners.append(successor)
            elif action == "stale" and len(owners) > 1 and open_ones:
                late = rng.choice(owners[:-1])
                if not late.buffer.is_closed:
                    await late.append(rng.choice(open_ones))  # its entries never arrive
            else:
                await bench.world.advance(rng.choice([0, 0.3, 1.2]))
            check(owners[-1])
        for txn in open_ones:
            states[txn] = "ABORTED"
            await bench.coordinator.end(txn, commit=False)
        await owners[-1].settle()
        await owners[-1].buffer.relist()
        await owners[-1].settle()
        check(owners[-1], complete=True)
        assert await bench.store.writes_in(SEGMENT) == []
        last = Owner(bench, log)
        await last.buffer.recover()
        check(last, complete=True)
        assert last.buffer.max_read_position == LATEST
        for txn, text in (await aborted(bench)).items():
            assert text_position(text) >= Position(7, max(n for n, each in enumerate(log.entries) if each == txn))
        for each in [*owners, last]:
            await each.close()
