"""`MetadataPendingAckStore` over a store and a link that fail: what was accepted counts once, what was refused never."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest
from tests.unit.txn.ack_model import SIZE, Message, ModelCursor, place, upto
from tests.unit.txn.coordination_bench import SEGMENT, Bench, brokers

from braid.errors import BraidError, Closed, NotReady, OutcomeUnknown, StoreUnavailable, TransactionConflict
from braid.model.ackset import full
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.runtime.plans import Moment, watching
from braid.runtime.tasks import Tasks
from braid.testing.faulty_metadata import Fault
from braid.txn.ack_conflicts import Hold
from braid.txn.ack_recovery import recover_all
from braid.txn.ack_requests import AckRequest, AckRoot
from braid.txn.api import Ack
from braid.txn.decisions import Decisions
from braid.txn.pending_acks import SETTLE_SECONDS, MetadataPendingAckStore
from braid.txn.records import TxnHeader
from braid.txn.stored_acks import StoredAcks

ENTRIES = 6


async def later(bench: Bench, seconds: float) -> None:
    """Time goes on, and everybody runs."""
    while seconds > 0:
        bench.clock.advance(min(seconds, 0.1))
        seconds -= 0.1
        for _turn in range(20):
            await asyncio.sleep(0)


class Listener:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.held_now: list[Position] = []
        self.released_now: list[Position] = []
        self.done: list[Position] = []

    def held(self, holds: Sequence[Hold]) -> None:
        self.held_now += [each.position for each in holds]

    def settled(self, acknowledged: Sequence[Position], released: Sequence[Position]) -> None:
        self.done += acknowledged
        self.released_now += released


class Owner:
    """One owner of the segment: what ends with a crash."""

    def __init__(self, bench: Bench, cursor: ModelCursor, reconcile_seconds: float = 1.0) -> None:
        self.bench = bench
        self.cursor = cursor
        self.listener = Listener()
        self.tasks = Tasks("owner")
        self.decisions = Decisions(bench.faulty, bench.store, bench.clock, reconcile_seconds=reconcile_seconds)
        self.decisions.start()
        self.acks = MetadataPendingAckStore(
            SEGMENT, "sub", cursor, bench.store, self.decisions, bench.clock, self.tasks, self.listener
        )

    async def recover(self) -> None:
        await recover_all(self.bench.store, SEGMENT, {"sub": self.acks}, self.cursor.check_owner, self.tasks, self.bench.clock)

    async def crash(self) -> Owner:
        """The next owner, with what was durable."""
        await self.close()
        after = ModelCursor(ENTRIES)
        after.acked = set(self.cursor.stored)
        after.stored = set(self.cursor.stored)
        owner = Owner(self.bench, after)
        await owner.recover()
        return owner

    async def close(self) -> None:
        self.decisions.kill()
        await self.tasks.close()
        await self.decisions.close()

    async def ack(self, txn: TxnId, *entries: int, cumulative: bool = False) -> None:
        await self.acknowledge(txn, [Ack(place(each)) for each in entries], cumulative=cumulative)

    async def acknowledge(self, txn: TxnId, acks: Sequence[Ack], *, cumulative: bool) -> None:
        """Time goes on if it has to wait for another transaction's end."""
        answer = self.acks.begin(txn, acks, cumulative=cumulative)
        for _turn in range(200):
            for _ in range(50):
                if answer.done():
                    break
                await asyncio.sleep(0)
            else:
                await later(self.bench, 0.1)
        await answer

    async def ops(self) -> int:
        return len(await self.bench.store.acks_in(SEGMENT, "sub"))

    async def settled(self) -> None:
        """Decided transactions are materialised; time goes on meanwhile."""
        for _turn in range(200):
            for _ in range(5):
                await asyncio.sleep(0)
            if not self.acks._roots:
                return
            await later(self.bench, 0.5)
        raise AssertionError(f"still held: {self.acks.transactions()}")

    def acked(self) -> list[int]:
        return [each for each in range(ENTRIES) if self.cursor.is_acknowledged(place(each))]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


@pytest.fixture
async def owner(bench: Bench) -> AsyncIterator[Owner]:
    made = Owner(bench, ModelCursor(ENTRIES))
    yield made
    await made.close()


@pytest.mark.inv("INV14")
@pytest.mark.parametrize("cumulative", [True, False])
async def test_whoever_commits_and_goes_on_is_not_refused_because_of_the_first(
    bench: Bench, owner: Owner, cumulative: bool
) -> None:
    """The first is decided, but not materialised here: nobody told this broker, and the store is slow."""
    owner.decisions.kill()
    for number in range(1, ENTRIES):
        txn = await bench.begin()
        if cumulative:
            await owner.ack(txn, number, cumulative=True)
        else:
            await owner.ack(txn, *([number] if number % 2 else [number - 1, number]))
        await bench.coordinator.end(txn, commit=bool(cumulative or number % 2 == 0))
    await owner.settled()
    assert owner.acked() == (list(range(ENTRIES)) if cumulative else [1, 2, 3, 4])
    assert await owner.ops() == 0


@pytest.mark.inv("INV14")
async def test_what_waits_for_a_decided_one_is_refused_when_its_own_ends(bench: Bench, owner: Owner) -> None:
    one, two = await bench.begin(), await bench.begin()
    await owner.ack(one, 1)
    bench.faulty.plan(Fault.UNAVAILABLE, "scan")
    await bench.coordinator.end(one, commit=False)
    waiting = owner.acks.begin(two, [Ack(place(1))], cumulative=False)
    for _turn in range(20):
        await asyncio.sleep(0)
    assert not waiting.done()
    await bench.coordinator.end(two, commit=False)
    await later(bench, 2.0)
    with pytest.raises(TransactionConflict):
        await waiting
    await owner.settled()
    assert owner.acked() == []
    assert await owner.ops() == 0


@pytest.mark.inv("INV14")
async def test_who_looks_at_the_one_in_the_way_while_that_ends_goes_on_at_once(
    bench: Bench, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one in the way is materialised while its header is read: nothing will happen after that, so nobody waits for it."""
    one, two = await bench.begin(), await bench.begin()
    await owner.ack(one, 1)
    asked, gate = asyncio.Event(), asyncio.Event()
    honest = StoredAcks.header

    async def slow(stored: StoredAcks, root: TxnId) -> TxnHeader | None:
        asked.set()
        await gate.wait()
        return await honest(stored, root)

    monkeypatch.setattr(StoredAcks, "header", slow)
    waiting = owner.acks.begin(two, [Ack(place(1))], cumulative=False)
    await asked.wait()
    await bench.coordinator.end(one, commit=False)
    async with asyncio.timeout(10):
        while one in owner.acks._roots:  # noqa: ASYNC110 - it is a dict
            await asyncio.sleep(0)
    gate.set()
    for _turn in range(100):  # no time goes by
        await asyncio.sleep(0)
    assert waiting.done()
    await waiting
    assert owner.acks.is_held(place(1))


@pytest.mark.inv("INV17")
async def test_the_end_of_ones_patience_does_not_make_others_spin(
    bench: Bench, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two wait for a decided transaction that cannot be materialised; the first one's patience ends."""
    one, two, three = await bench.begin(), await bench.begin(), await bench.begin()
    await owner.ack(one, 1)
    store_answers = asyncio.Event()
    materialise = StoredAcks.materialise

    async def slow(stored: StoredAcks, root: TxnId, state: AckRoot) -> None:
        await store_answers.wait()
        await materialise(stored, root, state)

    monkeypatch.setattr(StoredAcks, "materialise", slow)
    await bench.coordinator.end(one, commit=True)
    checks = 0
    check = MetadataPendingAckStore._check

    def counted(store: MetadataPendingAckStore, request: AckRequest, state: AckRoot) -> None:
        nonlocal checks
        checks += 1
        if checks > 1000:
            raise RuntimeError("the wait spins")  # or the loop would never turn again, and no test could say so
        check(store, request, state)

    monkeypatch.setattr(MetadataPendingAckStore, "_check", counted)
    first = owner.acks.begin(two, [Ack(place(1))], cumulative=False)
    await later(bench, SETTLE_SECONDS - 1.0)
    second = owner.acks.begin(three, [Ack(place(1))], cumulative=False)
    await later(bench, 2.0)
    assert first.done() and not second.done()
    with pytest.raises(TransactionConflict):
        await first
    assert checks < 60  # each reconciliation of the decisions tells it once more
    await later(bench, SETTLE_SECONDS)
    with pytest.raises(TransactionConflict):
        await second
    assert checks < 60  # each reconciliation of the decisions tells it once more
    store_answers.set()
    await owner.settled()
    assert owner.acked() == [1]


@pytest.mark.inv("INV14")
@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED])
@pytest.mark.parametrize("commit", [True, False])
async def test_an_op_that_may_have_been_written_keeps_others_away(
    bench: Bench, owner: Owner, fault: Fault, commit: bool
) -> None:
    one, two = await bench.begin(), await bench.begin()
    bench.faulty.plan(fault, "append")
    with pytest.raises((StoreUnavailable, OutcomeUnknown)):
        await owner.ack(one, 1)
    with pytest.raises(TransactionConflict):
        await owner.ack(two, 1)
    await bench.coordinator.end(one, commit=commit)
    await owner.settled()
    assert owner.acked() == []  # it was refused
    assert owner.listener.released_now == [place(1)]
    assert await owner.ops() == 0
    await owner.ack(two, 1)


@pytest.mark.inv("INV10")
async def test_a_repeated_ack_after_a_failure_is_written_again(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    bench.faulty.plan(Fault.UNKNOWN_DROPPED, "append")
    with pytest.raises(OutcomeUnknown):
        await owner.ack(txn, 1)
    await owner.ack(txn, 1)
    assert await owner.ops() == 1
    await bench.coordinator.end(txn, commit=True)
    await owner.settled()
    assert owner.acked() == [1]


@pytest.mark.parametrize("operation", ["get", "delete"])
async def test_a_failure_at_the_header_refuses_the_ack(bench: Bench, owner: Owner, operation: str) -> None:
    txn, other = await bench.begin(), await bench.begin()
    bench.faulty.plan(Fault.UNAVAILABLE, "get")
    if operation == "delete":
        bench.faulty.plan(Fault.UNAVAILABLE, "delete")
    with pytest.raises(StoreUnavailable):
        await owner.ack(txn, 2)
    is_clean = operation == "get"
    assert await owner.ops() == (0 if is_clean else 1)
    assert owner.acks.has_holds != is_clean
    if is_clean:
        await owner.ack(other, 2)
        assert owner.listener.released_now == [place(2)]
    else:
        with pytest.raises(TransactionConflict):
            await owner.ack(other, 2)
        await bench.coordinator.end(txn, commit=True)
        await owner.settled()
        assert owner.acked() == []
        assert await owner.ops() == 0


@pytest.mark.inv("INV11")
async def test_an_owner_that_lost_the_log_takes_its_ops_back(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    owner.cursor.is_lost = True
    with pytest.raises(TransactionConflict, match="another broker"):
        await owner.ack(txn, 0)
    assert await owner.ops() == 0


@pytest.mark.inv("INV12")
@pytest.mark.req("R473-39")
async def test_materialising_is_tried_until_it_is_done(bench: Bench) -> None:
    owner = Owner(bench, ModelCursor(ENTRIES), reconcile_seconds=1000.0)
    txn = await bench.begin()
    await owner.ack(txn, 3, cumulative=True)
    owner.cursor.failures = [NotReady("not now"), NotReady("not now")]
    await bench.coordinator.end(txn, commit=True)
    for operation in ("delete", "delete"):
        bench.faulty.plan(Fault.UNAVAILABLE, operation)
    await owner.settled()
    assert owner.cursor.flushes == 5
    assert owner.acked() == [0, 1, 2, 3]
    assert await owner.ops() == 0
    await owner.close()


@pytest.mark.inv("INV12")
async def test_ops_stay_while_the_cursor_cannot_be_made_durable(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    await owner.ack(txn, 1)
    owner.cursor.failures = [Closed("The cursor is closed.")]
    await bench.coordinator.end(txn, commit=True)
    await later(bench, 0.5)
    assert await owner.ops() == 1
    after = await owner.crash()
    assert after.acked() == [1]  # before anybody is served
    await after.settled()
    assert await after.ops() == 0
    assert after.cursor.stored == {(1, each) for each in range(SIZE)}
    await after.close()


@pytest.mark.inv("INV15")
async def test_a_lost_hint_delays_an_outcome_by_no_more_than_the_reconcile(bench: Bench, owner: Owner) -> None:
    bench.faulty.faults.watch_drop = 1.0
    txn = await bench.begin()
    await owner.ack(txn, 1)
    await bench.coordinator.end(txn, commit=True)
    for _turn in range(20):
        await asyncio.sleep(0)
    assert owner.acked() == []
    await later(bench, 1.1)
    for _turn in range(20):
        await asyncio.sleep(0)
    assert owner.acked() == [1]


async def test_acks_that_come_together_share_a_look_at_the_header(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    reached, go_on = asyncio.Event(), asyncio.Event()
    steps: list[str] = []

    async def hook(name: str, moment: Moment) -> None:
        if moment == "before":
            steps.append(name)
            if not reached.is_set():
                reached.set()
                await go_on.wait()

    with watching(hook):
        begun = [owner.acks.begin(txn, [Ack(place(0))], cumulative=False)]
        await reached.wait()
        begun += [owner.acks.begin(txn, [Ack(place(each))], cumulative=False) for each in (1, 2, 2, 3)]
        assert owner.listener.held_now == [place(each) for each in range(4)]  # at once, not when their turn comes
        go_on.set()
        await asyncio.gather(*begun)
    assert steps == ["txn-ack:op", "txn-ack:header", "txn-ack:owner", "txn-ack:hold"] * 2
    assert await owner.ops() == 4


async def test_a_refused_group_does_not_take_the_next_one_along(bench: Bench, owner: Owner) -> None:
    txn, other = await bench.begin(), await bench.begin()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hook(name: str, moment: Moment) -> None:
        if not reached.is_set() and (name, moment) == ("txn-ack:header", "before"):
            reached.set()
            await go_on.wait()

    with watching(hook):
        refused = owner.acks.begin(txn, [Ack(place(3), 0b110, SIZE), Ack(place(5))], cumulative=False)
        await reached.wait()
        repeats = owner.acks.begin(txn, [Ack(place(5))], cumulative=False)  # which the first one holds as well
        more = owner.acks.begin(txn, [Ack(place(3), 0b100, SIZE)], cumulative=False)
        bench.faulty.plan(Fault.UNAVAILABLE, "get")
        go_on.set()
        with pytest.raises(StoreUnavailable):
            await refused
        await asyncio.gather(repeats, more)
    assert await owner.ops() == 2
    for taken in (Ack(place(5)), Ack(place(3), 0b110, SIZE)):
        with pytest.raises(TransactionConflict):
            await owner.acks.acknowledge(other, [taken], cumulative=False)
    await bench.coordinator.end(txn, commit=True)
    await owner.settled()
    assert owner.cursor.acked == {(3, 0), (3, 1), *((5, each) for each in range(SIZE))}


async def test_acks_refused_together_let_go_of_everything(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    bench.faulty.plan(Fault.UNAVAILABLE, "get")
    begun = [owner.acks.begin(txn, [Ack(place(each))], cumulative=True) for each in (3, 1, 4)]
    answers = await asyncio.gather(*begun, return_exceptions=True)
    assert [type(each) for each in answers] == [StoreUnavailable] * 3
    assert not owner.acks.has_holds
    assert await owner.ops() == 0
    assert owner.decisions.held == 0


async def test_many_acks_at_once_are_all_written(bench: Bench, owner: Owner) -> None:
    owner.cursor.entries = 300
    txn = await bench.begin()
    await owner.ack(txn, *range(0, 300, 2))
    assert await owner.ops() == 150
    await bench.coordinator.end(txn, commit=True)
    await owner.settled()
    assert len(owner.cursor.stored) == 150 * SIZE


async def test_a_failed_reset_keeps_what_is_held(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    await owner.ack(txn, 1)
    with pytest.raises(NotReady):
        async with owner.acks.resetting():
            raise NotReady("The cursor cannot be reset now.")
    await bench.coordinator.end(txn, commit=True)
    await owner.settled()
    assert owner.acked() == [1]


async def test_what_was_decided_before_a_reset_is_done_before_it(bench: Bench, owner: Owner) -> None:
    """Else an interrupted reset would leave acknowledgments that are applied after it."""
    bench.faulty.faults.watch_drop = 1.0
    txn = await bench.begin()
    await owner.ack(txn, 3, cumulative=True)
    await bench.coordinator.end(txn, commit=True)

    async def hook(name: str, moment: Moment) -> None:
        if name == "txn-ack:reset":
            raise NotReady("interrupted")

    with watching(hook), pytest.raises(NotReady):
        async with owner.acks.resetting():
            assert owner.acked() == [0, 1, 2, 3]
            owner.cursor.acked.clear()
    assert await owner.ops() == 0
    await later(bench, 3)
    assert owner.acked() == []


async def test_a_decision_during_a_reset_does_not_undo_the_reset(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    await owner.ack(txn, 3, cumulative=True)
    async with owner.acks.resetting():
        await bench.coordinator.end(txn, commit=True)
        await later(bench, 3)
        assert owner.acked() == []
    await later(bench, 3)
    assert owner.acked() == []
    assert await owner.ops() == 0
    assert owner.decisions.held == 0


async def test_nothing_is_begun_after_the_end(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    await owner.ack(txn, 1)
    owner.acks.close()
    await owner.acks.drain()
    assert owner.decisions.held == 0
    with pytest.raises(NotReady):
        await owner.ack(txn, 2)
    await bench.coordinator.end(txn, commit=True)
    await later(bench, 3)
    assert owner.acked() == []
    assert await owner.ops() == 1


async def test_an_ack_under_way_at_the_end_is_finished(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hook(name: str, moment: Moment) -> None:
        if (name, moment) == ("txn-ack:op", "after"):
            reached.set()
            await go_on.wait()

    with watching(hook):
        begun = owner.acks.begin(txn, [Ack(place(1))], cumulative=False)
        await reached.wait()
        owner.acks.close()
        ended = asyncio.ensure_future(owner.acks.drain())
        await asyncio.sleep(0)
        assert not ended.done()
        go_on.set()
        await ended
    await begun
    assert await owner.ops() == 1


async def test_the_wait_for_acks_under_way_is_bounded(bench: Bench, owner: Owner) -> None:
    txn = await bench.begin()

    async def hook(name: str, moment: Moment) -> None:
        await asyncio.Event().wait()

    with watching(hook):
        begun = owner.acks.begin(txn, [Ack(place(1))], cumulative=False)
        await asyncio.sleep(0)
        owner.acks.close()
        ended = asyncio.ensure_future(owner.acks.drain())
        await asyncio.sleep(0)
        await later(bench, 6)
        await ended
    with pytest.raises(NotReady):
        await begun


async def test_who_holds_something_is_told_oldest_first(bench: Bench, owner: Owner) -> None:
    one = await bench.begin()
    await later(bench, 1)
    two = await bench.begin()
    await owner.ack(two, 4, 5)
    await owner.ack(one, 2, cumulative=True)
    assert [(each.txn, each.acks, each.position) for each in owner.acks.transactions()] == [(one, 1, "1:2"), (two, 2, "1:4")]
    assert owner.acks.transactions()[0].since_ms < owner.acks.transactions()[1].since_ms
    assert [owner.acks.is_held(place(each)) for each in range(ENTRIES)] == [True, True, True, False, True, True]
    assert owner.acks.held_mask(place(3)) is None


# A long life.


def pieces(rng: random.Random) -> tuple[Ack, set[Message]]:
    entry = rng.randrange(ENTRIES)
    if rng.random() < 0.5:
        return Ack(place(entry)), {(entry, each) for each in range(SIZE)}
    named = set(rng.sample(range(SIZE), rng.randint(1, SIZE)))
    mask = full(SIZE) & ~sum(1 << each for each in named)
    return Ack(place(entry), mask, SIZE), {(entry, each) for each in named}


@pytest.mark.inv("INV12", "INV14")
@pytest.mark.req("R473-29", "R473-30", "R473-31", "R473-39")
@pytest.mark.parametrize("seed", range(40))
async def test_committed_acks_count_exactly_and_nothing_else_does(seed: int) -> None:
    """Random acknowledgments, outcomes, crashes and faults of the store; acknowledged is what committed transactions were
    told that they hold, and at most what they asked for."""
    async with brokers(2) as (bench, sound):  # the coordinator's link is sound
        rng = random.Random(seed)
        owner = Owner(bench, ModelCursor(ENTRIES))
        promised: dict[TxnId, set[Message]] = {}
        asked: dict[TxnId, set[Message]] = {}
        least: set[Message] = set()
        most: set[Message] = set()
        for _turn in range(40):
            what = rng.random()
            if what < 0.2 or not promised:
                txn = await sound.begin()
                promised[txn], asked[txn] = set(), set()
            elif what < 0.7:
                txn = rng.choice(list(promised))
                if rng.random() < 0.15:
                    bench.faulty.plan(rng.choice(list(Fault)), rng.choice(["append", "get", "delete", "scan"]))
                cumulative = rng.random() < 0.3
                if cumulative:
                    entry, number = rng.randrange(ENTRIES), rng.randrange(SIZE)
                    acks = [Ack(place(entry), full(SIZE) & ~full(number + 1), SIZE)]
                    named = upto((entry, number))
                else:
                    picked = [pieces(rng) for _ in range(rng.randint(1, 2))]
                    acks = [ack for ack, _ in picked]
                    named = {each for _, messages in picked for each in messages}
                asked[txn] |= named
                try:
                    await owner.acknowledge(txn, acks, cumulative=cumulative)
                except BraidError:
                    continue
                promised[txn] |= named
            elif what < 0.9:
                txn = rng.choice(list(promised))
                commit = rng.random() < 0.6
                held, wanted = promised.pop(txn), asked.pop(txn)
                await sound.coordinator.end(txn, commit=commit)
                if commit:
                    least |= held
                    most |= wanted
                if rng.random() < 0.5:
                    await later(bench, rng.choice([0.1, 2.0]))
            else:
                bench.faulty._plans.clear()
                owner = await owner.crash()
                assert least <= owner.cursor.acked <= most
        bench.faulty._plans.clear()
        for txn in list(promised):
            await sound.coordinator.end(txn, commit=False)
        await owner.settled()
        await owner.acks.relist()
        assert least <= owner.cursor.acked <= most
        assert await owner.ops() == 0
        assert not owner.acks.has_holds
        assert owner.decisions.held == 0
        await owner.close()
