"""Sub-transactions: a decider's one swap decides all of them. First by example, then against a model in which two brokers, bad
links, late writers, deadlines and the collection take turns at random."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.txn.coordination_bench import MINUTE_MS, Bench, brokers, write

from braid.errors import (
    InvalidArgument,
    InvalidTransactionStatus,
    NotAllowed,
    StoreError,
    TransactionNotFound,
)
from braid.metadata.api import MetadataStore, Span
from braid.model.txn import MAX_SUB, TxnId
from braid.testing.conformance.metadata_world import collect_names
from braid.testing.faulty_metadata import Fault
from braid.txn import records
from braid.txn.config import TransactionConfig
from braid.txn.store import StoredOp, TransactionStore
from braid.txn.sweeps import TransactionSweeps


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


async def subs_of(bench: Bench, root: TxnId) -> list[str]:
    return await collect_names(bench.faulty.names(Span(records.subs_of(root))))


async def test_winners_live_and_the_others_do_not(bench: Bench) -> None:
    root = await bench.begin(is_decider=True)
    subs = [await bench.coordinator.new_sub(root) for _ in range(4)]
    assert [sub.sub for sub in subs] == [1, 2, 3, 4]
    assert {sub.root for sub in subs} == {root}
    await bench.coordinator.decide(root, [4, 2, 2])
    header = (await bench.header(root)).value
    assert header.winners == (2, 4)
    assert [header.outcome(number) for number in range(6)] == [
        "COMMITTED",
        "ABORTED",
        "COMMITTED",
        "ABORTED",
        "COMMITTED",
        "ABORTED",
    ]


async def test_decide_can_be_repeated_and_not_be_changed(bench: Bench) -> None:
    root = await bench.begin(is_decider=True)
    for _ in range(3):
        await bench.coordinator.new_sub(root)
    await bench.coordinator.decide(root, [1, 3])
    before = await bench.header(root)
    await bench.coordinator.decide(root, (3, 1))
    await bench.coordinator.end(root, commit=True)  # the same state; who won was not asked
    for winners in ([], [1], [1, 2, 3]):
        with pytest.raises(InvalidTransactionStatus, match="was committed with the winners 1, 3 already"):
            await bench.coordinator.decide(root, winners)
    with pytest.raises(InvalidTransactionStatus):
        await bench.coordinator.end(root, commit=False)
    with pytest.raises(InvalidTransactionStatus):
        await bench.coordinator.renew(root, 1000)
    assert await bench.header(root) == before


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE, Fault.CONFLICT])
async def test_decide_settles_what_the_store_left_open(bench: Bench, fault: Fault) -> None:
    root = await bench.begin(is_decider=True)
    await bench.coordinator.new_sub(root)
    bench.faulty.plan(fault, "put", records.header_key(root))
    await bench.coordinator.decide(root, [1])
    assert (await bench.header(root)).value.winners == (1,)


async def test_committing_a_decider_names_no_winners_and_aborting_it_aborts_all(bench: Bench) -> None:
    committed, aborted = [await bench.begin(is_decider=True) for _ in range(2)]
    await bench.coordinator.end(committed, commit=True)
    await bench.coordinator.end(aborted, commit=False)
    assert [await bench.state(committed), await bench.state(committed.with_sub(1))] == ["COMMITTED", "ABORTED"]
    assert [await bench.state(aborted), await bench.state(aborted.with_sub(1))] == ["ABORTED", "ABORTED"]
    with pytest.raises(InvalidTransactionStatus):
        await bench.coordinator.decide(aborted, [])


@pytest.mark.parametrize("winners", [[0], [-1], [1, MAX_SUB + 1]])
async def test_winners_out_of_range_are_refused(bench: Bench, winners: list[int]) -> None:
    root = await bench.begin(is_decider=True)
    with pytest.raises(InvalidArgument, match="winners are numbers from 1 to 1048575"):
        await bench.coordinator.decide(root, winners)
    assert await bench.state(root) == "OPEN"


async def test_a_winner_that_nobody_is_decides_nothing(bench: Bench) -> None:
    root = await bench.begin(is_decider=True)
    await bench.coordinator.new_sub(root)
    with pytest.raises(InvalidArgument, match="has no sub-transaction 2; it was not decided"):
        await bench.coordinator.decide(root, [1, 2])
    assert await bench.state(root) == "OPEN"


async def test_ordinary_transactions_have_none_of_it(bench: Bench) -> None:
    root = await bench.begin()
    for call in (
        bench.coordinator.new_sub(root),
        bench.coordinator.decide(root, [1]),
        bench.coordinator.renew(root, 1000),
    ):
        with pytest.raises(NotAllowed, match="is no decider"):
            await call
    assert await bench.state(root) == "OPEN"
    assert await subs_of(bench, root) == []


async def test_sub_transactions_decide_nothing_themselves(bench: Bench) -> None:
    root = await bench.begin(is_decider=True)
    sub = await bench.coordinator.new_sub(root)
    for call in (
        bench.coordinator.end(sub, commit=True),
        bench.coordinator.new_sub(sub),
        bench.coordinator.decide(sub, [1]),
        bench.coordinator.renew(sub, 1000),
    ):
        with pytest.raises(NotAllowed, match=f"{sub} is a sub-transaction .* {root} decides it"):
            await call
    await bench.coordinator.check(sub, None)


async def test_numbers_are_unique_across_brokers() -> None:
    async with brokers(3) as benches:
        root = await benches[0].begin(is_decider=True)
        made = await asyncio.gather(*[benches[number % 3].coordinator.new_sub(root) for number in range(60)])
        assert sorted(txn.sub for txn in made) == list(range(1, 61))


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE])
async def test_a_number_whose_outcome_is_unknown_is_not_given_out(bench: Bench, fault: Fault) -> None:
    root = await bench.begin(is_decider=True)
    bench.faulty.plan(fault, "append")
    made = [await bench.coordinator.new_sub(root) for _ in range(3)]
    assert len(set(made)) == 3


async def test_no_number_is_given_out_after_the_decision(bench: Bench) -> None:
    """Also not if the decision falls between the two reads, and what was written down goes again."""
    decided = await bench.begin(is_decider=True)
    append = bench.store.append_sub

    async def late(root: TxnId) -> int:
        await bench.coordinator.decide(decided, [])
        return await append(root)

    bench.store.append_sub = late  # type: ignore[method-assign]
    with pytest.raises(InvalidTransactionStatus, match=f"{decided} is COMMITTED"):
        await bench.coordinator.new_sub(decided)
    assert await subs_of(bench, decided) == []

    async def very_late(root: TxnId) -> int:
        await bench.store.delete_header(await bench.header(gone))
        return await append(root)

    gone = await bench.begin(is_decider=True)
    bench.store.append_sub = very_late  # type: ignore[method-assign]
    with pytest.raises(TransactionNotFound):
        await bench.coordinator.new_sub(gone)
    assert await subs_of(bench, gone) == []


async def test_the_last_number(bench: Bench) -> None:
    root = await bench.begin(is_decider=True)
    await bench.faulty.append(f"{records.subs_of(root)}/s", b"", partition=str(root), deltas=(MAX_SUB - 1,))
    assert (await bench.coordinator.new_sub(root)).sub == MAX_SUB
    with pytest.raises(NotAllowed, match="the most there can be"):
        await bench.coordinator.new_sub(root)


async def test_renewing_moves_the_deadline_and_never_back(bench: Bench) -> None:
    root = await bench.begin(is_decider=True)
    begun = await bench.header(root)
    await bench.coordinator.renew(root, 1000)
    assert await bench.header(root) == begun
    await bench.world.advance(30)
    await bench.coordinator.renew(root, MINUTE_MS)
    header = await bench.header(root)
    assert header.value.timeout_ms == begun.value.timeout_ms + 30_000
    assert [each.root async for each in bench.store.expired(header.value.timeout_ms - 1)] == []
    for timeout_ms in (0, 10**12):
        with pytest.raises(NotAllowed, match=r"transactions\.max_timeout_seconds"):
            await bench.coordinator.renew(root, timeout_ms)


@pytest.mark.parametrize("fault", [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.CONFLICT])
async def test_renewing_survives_bad_luck(bench: Bench, fault: Fault) -> None:
    root = await bench.begin(is_decider=True)
    bench.faulty.plan(fault, "put", records.header_key(root))
    await bench.coordinator.renew(root, 2 * MINUTE_MS)
    assert (await bench.header(root)).value.timeout_ms == bench.clock.now_ms() + 2 * MINUTE_MS


# The model.

Outcome = tuple[str, tuple[int, ...]]
ABORTED: Outcome = ("ABORTED", ())


@dataclass
class Writer:
    """A participant in the middle of a write: op, header, entry; other things happen in between."""

    txn: TxnId
    op: StoredOp | None = None
    may_append: bool = False
    is_over: bool = False


@dataclass
class Known:
    """What the model knows of one transaction."""

    root: TxnId
    is_decider: bool
    asked: set[Outcome] = field(default_factory=set)
    """What somebody tried to make of it."""
    promised: Outcome | None = None
    """What somebody was told."""
    final: Outcome | None = None
    deadline: int = 0
    renewals: int = 0
    subs: list[int] = field(default_factory=list)
    entries: list[TxnId] = field(default_factory=list)
    """In the log, by sub-transaction."""
    is_collected: bool = False


class Model:
    """Everything that happened, and what must hold after each step."""

    def __init__(self, benches: list[Bench], clean: MetadataStore) -> None:
        self.benches = benches
        self.clean = TransactionStore(clean, benches[0].clock)
        self.known: list[Known] = []
        self.writers: list[Writer] = []
        self.sweeps = [
            TransactionSweeps(
                bench.store,
                bench.coordinator,
                self,  # type: ignore[arg-type]
                bench.clock,
                bench.config,
                self._load,
                bench.sinks,
            )
            for bench in benches
        ]

    def leads(self, _number: int) -> bool:
        return True

    async def _load(self, _segment: str) -> bool:
        """The owner materialises: not while one of the transaction's writes may still be appended (INV12)."""
        for known in self.known:
            if known.final is not None and not any(each.txn.root == known.root and each.may_append for each in self.writers):
                for op in await self.clean.ops(known.root):
                    await self.clean.delete_op(op)
        return True

    # Steps. `at` picks a transaction, `who` a broker, `what` a detail.

    async def begin(self, at: int, who: int, what: int) -> None:
        is_decider = at % 4 != 0
        root = await self.benches[who].coordinator.new(0, 1 + what * 1000, owner=None, is_decider=is_decider)
        assert root not in [known.root for known in self.known]
        self.known.append(Known(root, is_decider, deadline=self.benches[who].clock.now_ms() + 1 + what * 1000))

    async def new_sub(self, at: int, who: int, _what: int) -> None:
        known = self.known[at % len(self.known)]
        try:
            sub = await self.benches[who].coordinator.new_sub(known.root)
        except NotAllowed:
            assert not known.is_decider
        except (InvalidTransactionStatus, TransactionNotFound):
            assert await self._is_final(known)
        else:
            assert known.is_decider
            assert sub.sub not in known.subs
            known.subs.append(sub.sub)

    async def decide(self, at: int, who: int, what: int) -> None:
        known = self.known[at % len(self.known)]
        winners = tuple(sub for sub in sorted(known.subs) if (what >> (sub % 4)) & 1)
        await self._end(known, ("COMMITTED", winners), self.benches[who].coordinator.decide(known.root, winners))

    async def end(self, at: int, who: int, what: int) -> None:
        known = self.known[at % len(self.known)]
        commit = bool(what % 2)
        wanted = ("COMMITTED", ()) if commit else ABORTED
        await self._end(known, wanted, self.benches[who].coordinator.end(known.root, commit=commit))

    async def _end(self, known: Known, wanted: Outcome, call: object) -> None:
        by_decide = wanted[0] == "COMMITTED" and getattr(call, "__name__", "") == "decide"
        if by_decide and not known.is_decider:
            with pytest.raises((NotAllowed, StoreError, TransactionNotFound)):
                await call  # type: ignore[misc]
            return
        known.asked.add(wanted)
        try:
            await call  # type: ignore[misc]
        except InvalidTransactionStatus:
            assert await self._is_final(known)
            await self.look()
            assert known.is_collected or known.final != wanted
        except TransactionNotFound:
            assert known.is_collected
        else:
            found = await self.clean.header(known.root)
            winners = (
                wanted[1] if found is None or by_decide else found.value.winners
            )  # else the state was asked for, of whatever winners
            outcome = (wanted[0], winners)
            assert known.promised in (None, outcome)
            known.promised = outcome

    async def renew(self, at: int, who: int, what: int) -> None:
        known = self.known[at % len(self.known)]
        timeout_ms = 1 + what * 1000
        known.renewals += known.is_decider
        try:
            await self.benches[who].coordinator.renew(known.root, timeout_ms)
        except NotAllowed:
            assert not known.is_decider
        except (InvalidTransactionStatus, TransactionNotFound):
            assert await self._is_final(known)
        else:
            assert known.is_decider

    async def start_write(self, at: int, _who: int, what: int) -> None:
        known = self.known[at % len(self.known)]
        numbers = [0, *known.subs]
        writer = Writer(known.root.with_sub(numbers[what % len(numbers)]))
        writer.op = await self.clean.append_op(writer.txn, write())
        self.writers.append(writer)

    async def go_on(self, at: int, _who: int, _what: int) -> None:
        """Header after op (INV11), then the entry."""
        waiting = [writer for writer in self.writers if not writer.is_over]
        if not waiting:
            return
        writer = waiting[at % len(waiting)]
        known = next(each for each in self.known if each.root == writer.txn.root)
        if writer.may_append:
            known.entries.append(writer.txn)
            writer.may_append, writer.is_over = False, True
            return
        header = await self.clean.header(writer.txn.root)
        if header is not None and header.value.is_open:
            writer.may_append = True
            return
        writer.is_over = True
        assert writer.op is not None
        await self.clean.delete_op(writer.op)

    async def pass_time(self, at: int, _who: int, _what: int) -> None:
        await self.benches[0].world.advance([0.5, 2.0, 61.0][at % 3])

    async def sweep(self, at: int, who: int, _what: int) -> None:
        now = self.benches[who].clock.now_ms()
        for known in self.known:
            found = await self.clean.header(known.root)
            if found is not None and found.value.is_open and found.value.timeout_ms <= now:
                known.asked.add(ABORTED)
        await self.sweeps[who].abort_expired()
        if at % 2:
            await self.sweeps[who].collect()

    # What must hold.

    async def _is_final(self, known: Known) -> bool:
        found = await self.clean.header(known.root)
        return found is None or not found.value.is_open

    async def look(self) -> None:
        for known in self.known:
            record = await self.clean.metadata.get(records.header_key(known.root), partition=str(known.root))
            if record is None:
                known.is_collected = True
                assert await self.clean.ops(known.root) == [] or any(
                    writer.txn.root == known.root and not writer.is_over and not writer.may_append for writer in self.writers
                ), "a header went before its ops"
                # What was never observed between decision and collection was asked for or timed out.
                if known.final is None:
                    known.final = known.promised or (next(iter(known.asked)) if len(known.asked) == 1 else None)
                continue
            assert not known.is_collected, "a transaction came back"
            header = records.decode_header(record.key, record.value)
            if header.is_open:
                assert known.final is None, "a final state was left"
                assert known.promised is None, "an answer was given and the header is open"
                continue
            outcome = (header.state, header.winners)
            assert known.final in (None, outcome), "a final state changed"
            assert outcome in known.asked, "nobody asked for this outcome"
            assert known.promised in (None, outcome), "somebody was told another outcome"
            known.final = outcome
            assert record.mods <= 1 + known.renewals + sum(each.faulty.hits.get("conflict", 0) for each in self.benches)

    async def settle(self) -> None:
        """Links heal, writers end, deadlines pass: nothing is left but the outcome of what was written."""
        for bench in self.benches:
            bench.faulty.faults.clear()
        await self.benches[0].world.advance(1)
        await self.look()
        while any(not writer.is_over for writer in self.writers):
            await self.go_on(0, 0, 0)
        await self.pass_time(2, 0, 0)
        await self.sweep(0, 0, 0)
        await self.look()
        visible = {known.root: self._visible(known) for known in self.known}
        for _ in range(3):
            await self.pass_time(2, 0, 0)
            await self.sweep(1, 0, 0)
            await self.look()
        for known in self.known:
            assert known.is_collected
            assert self._visible(known) == visible[known.root], "an entry joined a finished transaction"
        collections = [records.HEADERS, *[records.ops_of(known.root) for known in self.known]]
        if not any(hits for bench in self.benches for hits in bench.faulty.hits.values()):
            # A number that a broken link wrote, or could not take back, when its transaction was collected already, stays.
            collections += [records.subs_of(known.root) for known in self.known]
        for collection in collections:
            assert await collect_names(self.clean.metadata.names(Span(collection))) == [], collection

    def _visible(self, known: Known) -> list[TxnId]:
        if known.final is None:
            return []
        state, winners = known.final
        return [txn for txn in known.entries if state == "COMMITTED" and (txn.sub == 0 or txn.sub in winners)]


steps = st.tuples(
    st.sampled_from(
        [
            "begin",
            "new_sub",
            "new_sub",
            "decide",
            "end",
            "renew",
            "start_write",
            "start_write",
            "go_on",
            "go_on",
            "pass_time",
            "sweep",
        ]
    ),
    st.integers(0, 7),
    st.integers(0, 1),
    st.integers(0, 15),
)


@pytest.mark.req("R473-8", "R473-21")
@pytest.mark.inv("INV11", "INV12")
@given(st.lists(steps, max_size=40), st.integers(0, 2**16), st.sampled_from([0.0, 0.1]))
@settings(max_examples=150, deadline=None)
def test_model(script: list[tuple[str, int, int, int]], seed: int, share: float) -> None:
    async def main() -> None:
        async with brokers(2, TransactionConfig(max_timeout_seconds=3600, retention_seconds=60)) as benches:
            for number, bench in enumerate(benches):
                bench.faulty.random.seed(seed + number)
                faults = bench.faulty.faults
                faults.unavailable = faults.unknown_applied = faults.unknown_dropped = faults.unknown_late = share / 2
                faults.conflict = share
            model = Model(benches, await benches[0].world.handle())
            for name, at, who, what in [("begin", 1, 0, 15), *script]:
                try:
                    if model.known or name == "begin":
                        await getattr(model, name)(at, who, what)
                except StoreError:
                    pass  # the caller was told so; what became of it is judged by what is stored
                await model.look()
            await model.settle()

    asyncio.run(main())
