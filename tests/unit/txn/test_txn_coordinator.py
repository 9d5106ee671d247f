"""`TransactionCoordinator`: one write to begin, one to decide, whatever the store answers; limits and bad input."""

import asyncio
from collections.abc import AsyncIterator

import msgspec
import pytest
from tests.unit.txn.coordination_bench import MINUTE_MS, SEGMENT, Bench, ack, brokers, write

from braid.errors import (
    InvalidTransactionStatus,
    NotAllowed,
    OutcomeUnknown,
    Overloaded,
    StoreMismatch,
    StoreUnavailable,
    TransactionCoordinatorNotFound,
    TransactionNotFound,
    VersionConflict,
)
from braid.metadata.api import Span
from braid.model.txn import TxnId
from braid.testing.faulty_metadata import Fault
from braid.txn import records
from braid.txn.config import TransactionConfig
from braid.txn.coordinator import BLOCK

UNKNOWN = [Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED, Fault.UNKNOWN_LATE]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with brokers() as (made,):
        yield made


def count_writes(bench: Bench) -> list[tuple[str, str]]:
    """Every write that reaches the store from now on."""
    seen: list[tuple[str, str]] = []
    inner = bench.faulty.inner
    for name in ("put", "append", "delete", "delete_span"):

        def noting(
            key: object, *args: object, _name: str = name, _call: object = getattr(inner, name), **options: object
        ) -> object:
            seen.append((_name, str(key)))
            return _call(key, *args, **options)  # type: ignore[operator]

        setattr(inner, name, noting)
    return seen


# Begin.


@pytest.mark.req("R473-32", "R473-7")
async def test_begin_creates_an_open_header_with_an_absolute_deadline(bench: Bench) -> None:
    now = bench.clock.now_ms()
    txn = await bench.coordinator.new(5, 3_000, owner="ann")
    header = (await bench.header(txn)).value
    assert (header.state, header.created_ms, header.timeout_ms, header.owner) == ("OPEN", now, now + 3_000, "ann")
    assert header.finalized_ms is None
    assert not header.is_decider
    assert (txn.most, txn.sub) == (5, 0)
    assert (await bench.faulty.get("/txn/5_1048576", partition="5_1048576")) is not None


@pytest.mark.req("R473-34", "R473-47")
async def test_a_transaction_costs_two_writes_whatever_it_did(bench: Bench) -> None:
    await bench.begin()  # reserves serials
    for count in (0, 1, 10, 200):
        seen = count_writes(bench)
        txn = await bench.begin()
        for number in range(count):
            await bench.store.append_op(txn, write(f"{SEGMENT}{number}"))
        await bench.coordinator.check(txn, None)
        await bench.coordinator.end(txn, commit=True)
        key = records.header_key(txn)
        assert [each for each in seen if each[0] != "append"] == [("put", key), ("put", key)]
        record = await bench.faulty.get(key, partition=str(txn))
        assert record is not None
        assert record.mods == 1


async def test_ids_never_repeat_across_brokers_and_restarts() -> None:
    async with brokers(3) as benches:
        found: list[TxnId] = []
        for _ in range(3):
            for bench in benches:
                found += await asyncio.gather(*[bench.begin(number) for number in (0, 1) for _ in range(5)])
        again = Bench(benches[0].world, await benches[0].world.handle(), benches[0].config)  # the same broker, restarted
        found += [await again.begin(0) for _ in range(5)]
        assert len(set(found)) == len(found)
        assert TxnId(0, 0) not in found
        assert {txn.serial // BLOCK for txn in found if txn.most == 0} == {0, 1, 2, 3}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (b'{"next":"x"}', "The record /txn-serial/3 cannot be read"),
        (b'{"next":8796093022200}', "By the record /txn-serial/3 .* 3 has used all ids below 8796093022200"),
        (b'{"next":9223372036854775807}', "By the record /txn-serial/3"),
    ],
)
async def test_a_spoilt_record_of_serials_refuses_its_own_coordinator_and_stays_as_it_is(
    bench: Bench, value: bytes, why: str
) -> None:
    await bench.faulty.put(records.serial_key(3), value)
    for _again in range(2):
        with pytest.raises(StoreMismatch, match=why):
            await bench.coordinator.new(3, MINUTE_MS, owner=None)
    found = await bench.faulty.get(records.serial_key(3))
    assert found is not None and found.value == value
    assert (await bench.coordinator.new(4, MINUTE_MS, owner=None)).most == 4
    await bench.faulty.put(records.serial_key(3), b'{"next":0}')
    assert (await bench.coordinator.new(3, MINUTE_MS, owner=None)).serial == 1  # repaired: no restart is needed


async def test_serials_are_reserved_once_in_ten_thousand(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braid.txn.coordinator.BLOCK", 10)
    seen = count_writes(bench)
    found = await asyncio.gather(*[bench.begin() for _ in range(25)])
    assert sorted(txn.serial for txn in found) == list(range(1, 26))
    assert len([key for _name, key in seen if key == records.serial_key(0)]) == 3


@pytest.mark.parametrize("fault", [*UNKNOWN, Fault.CONFLICT])
async def test_reserving_serials_survives_bad_luck(bench: Bench, fault: Fault) -> None:
    bench.faulty.plan(fault, "put", records.serial_key(0))
    found = [await bench.begin() for _ in range(3)]
    assert len(set(found)) == 3
    assert bench.faulty.hits == {fault.value: 1}


@pytest.mark.parametrize("fault", [*UNKNOWN, Fault.CONFLICT])
async def test_begin_with_an_unknown_outcome_gives_a_transaction_that_exists(bench: Bench, fault: Fault) -> None:
    first = await bench.begin()
    bench.faulty.plan(fault, "put", records.header_key(TxnId.of(0, first.serial + 1)))
    txn = await bench.begin()
    assert bench.faulty.hits == {fault.value: 1}
    assert await bench.state(txn) == "OPEN"
    expected = first.serial + 1 if fault is Fault.UNKNOWN_APPLIED else first.serial + 2
    assert txn.serial == expected


@pytest.mark.parametrize("timeout_ms", [0, -1, 60_001, 2**63])
async def test_absurd_timeouts_are_refused(timeout_ms: int) -> None:
    async with brokers(config=TransactionConfig(max_timeout_seconds=60)) as (bench,):
        seen = count_writes(bench)
        with pytest.raises(NotAllowed, match=r"it is 1 to 60000 ms \(transactions\.max_timeout_seconds\)"):
            await bench.coordinator.new(0, timeout_ms, owner=None)
        assert seen == []
        for fine in (1, 60_000):
            await bench.coordinator.new(0, fine, owner=None)


@pytest.mark.parametrize("number", [-1, 4, 2**63])
async def test_unknown_coordinators_are_refused(number: int) -> None:
    async with brokers(config=TransactionConfig(coordinators=4)) as (bench,):
        with pytest.raises(TransactionCoordinatorNotFound, match="they are 0 to 3"):
            await bench.begin(number)


# Limits.


@pytest.mark.inv("INV17")
async def test_open_transactions_are_limited_by_coordinator() -> None:
    async with brokers(config=TransactionConfig(max_open_per_coordinator=3)) as (bench,):
        opened = [await bench.begin() for _ in range(3)]
        with pytest.raises(Overloaded, match=r"has 3 open transactions \(transactions\.max_open_per_coordinator\)"):
            await bench.begin()
        await bench.begin(1)
        await bench.coordinator.end(opened[0], commit=False)
        await bench.begin()
        assert bench.coordinator.open_counts == {0: 3, 1: 1} | dict.fromkeys(range(2, 16), 0)
        with pytest.raises(Overloaded):
            await bench.begin()


async def test_a_burst_does_not_pass_the_limit() -> None:
    async with brokers(config=TransactionConfig(max_open_per_coordinator=5)) as (bench,):
        await bench.begin()
        results = await asyncio.gather(*[bench.begin() for _ in range(20)], return_exceptions=True)
        assert sum(isinstance(each, Overloaded) for each in results) == 16
        assert len([root async for root in bench.store.open_roots()]) == 5


async def test_what_other_brokers_ended_frees_room() -> None:
    async with brokers(2, TransactionConfig(max_open_per_coordinator=3)) as (one, two):
        opened = [await one.begin() for _ in range(3)]
        with pytest.raises(Overloaded):
            await one.begin()
        for txn in opened:
            await two.coordinator.end(txn, commit=True)
        with pytest.raises(Overloaded):  # counted a moment ago
            await one.begin()
        await one.world.advance(1.1)
        await one.begin()
        assert one.coordinator.open_counts[0] == 1


async def test_what_other_brokers_began_is_counted() -> None:
    async with brokers(2, TransactionConfig(max_open_per_coordinator=3)) as (one, two):
        for _ in range(3):
            await one.begin()
        await two.coordinator.recount()
        with pytest.raises(Overloaded):
            await two.begin()


async def test_those_that_are_refused_at_the_same_time_share_a_count() -> None:
    """A count reads every open transaction of the cluster."""
    async with brokers(config=TransactionConfig(max_open_per_coordinator=3)) as (bench,):
        for _ in range(3):
            await bench.begin()
        counts, scan = 0, bench.store.open_roots

        async def counted() -> AsyncIterator[TxnId]:
            nonlocal counts
            counts += 1
            await asyncio.sleep(0)  # as where there are thousands
            async for root in scan():
                yield root

        bench.store.open_roots = counted  # type: ignore[method-assign]
        results = await asyncio.gather(*[bench.begin() for _ in range(20)], return_exceptions=True)
        assert all(isinstance(each, Overloaded) for each in results)
        assert counts == 1


async def test_refused_begins_leave_no_count(bench: Bench) -> None:
    await bench.begin()
    bench.faulty.is_cut = True
    with pytest.raises(StoreUnavailable):
        await bench.begin()
    bench.faulty.is_cut = False
    assert bench.coordinator.open_counts[0] == 1


async def test_recount_keeps_what_changes_meanwhile(bench: Bench) -> None:
    """Begun and ended while the index is read, which takes time on a store that is far."""
    early = await bench.begin()
    scan = bench.store.open_roots

    async def slow() -> AsyncIterator[TxnId]:
        found = [root async for root in scan()]
        await bench.coordinator.end(early, commit=True)
        late.append(await bench.begin())
        brief = await bench.begin()
        await bench.coordinator.end(brief, commit=False)
        for root in found:
            yield root

    late: list[TxnId] = []
    bench.store.open_roots = slow  # type: ignore[method-assign]
    await bench.coordinator.recount()
    assert bench.coordinator.open_counts[0] == 1
    assert list(bench.coordinator._open[0]) == late


# End.


@pytest.mark.req("R473-8", "R473-34")
@pytest.mark.parametrize("commit", [True, False])
async def test_end_is_one_swap_with_its_time_and_can_be_repeated(bench: Bench, commit: bool) -> None:
    txn = await bench.begin()
    await bench.world.advance(1)
    seen = count_writes(bench)
    for _ in range(3):
        await bench.coordinator.end(txn, commit=commit)
        await bench.world.advance(1)
    assert [each for each in seen if "tick" not in each[1]] == [("put", records.header_key(txn))]
    header = (await bench.header(txn)).value
    assert header.state == ("COMMITTED" if commit else "ABORTED")
    assert header.finalized_ms == header.created_ms + 1000
    assert header.timeout_ms == header.created_ms + MINUTE_MS
    assert bench.store.counters.header_cas == {"ok": 1, "conflict": 0, "reject": 0}


@pytest.mark.req("R473-8")
@pytest.mark.parametrize("commit", [True, False])
async def test_a_final_state_is_for_ever(bench: Bench, commit: bool) -> None:
    txn = await bench.begin()
    await bench.coordinator.end(txn, commit=commit)
    before = await bench.header(txn)
    word = "committed" if commit else "aborted"
    with pytest.raises(InvalidTransactionStatus, match=f"{txn} was {word} already"):
        await bench.coordinator.end(txn, commit=not commit)
    with pytest.raises(InvalidTransactionStatus):
        await bench.coordinator.check(txn, None)
    with pytest.raises(NotAllowed):
        await bench.coordinator.renew(txn, 1000)
    assert not await bench.coordinator.expire(msgspec.structs.replace(before, version=before.version - 1))
    assert await bench.header(txn) == before
    assert bench.store.counters.header_cas["reject"] == 1


async def test_unknown_transactions_are_named(bench: Bench) -> None:
    txn = TxnId.of(0, 77)
    with pytest.raises(TransactionNotFound, match="The transaction 0_80740352 does not exist"):
        await bench.coordinator.end(txn, commit=True)
    with pytest.raises(TransactionNotFound):
        await bench.coordinator.check(txn, None)
    with pytest.raises(TransactionNotFound):
        await bench.coordinator.describe(txn)
    with pytest.raises(TransactionNotFound):
        await bench.coordinator.renew(txn, 1000)
    with pytest.raises(TransactionNotFound):
        await bench.coordinator.new_sub(txn)
    with pytest.raises(TransactionNotFound):
        await bench.coordinator.decide(txn, [1])
    assert [name async for name in bench.faulty.names(Span("/txn"))] == []
    assert bench.store.counters.header_cas["reject"] == 2


async def test_only_the_owner_and_super_users_may_touch_it(bench: Bench) -> None:
    coordinator = bench.coordinator
    txn = await bench.begin(owner="ann", is_decider=True)
    for principal in ("bob", None):
        with pytest.raises(TransactionNotFound):
            await coordinator.end(txn, commit=True, principal=principal, is_super=False)
        with pytest.raises(TransactionNotFound):
            await coordinator.check(txn, principal)
        with pytest.raises(TransactionNotFound):
            await coordinator.new_sub(txn, principal=principal, is_super=False)
        with pytest.raises(TransactionNotFound):
            await coordinator.decide(txn, [], principal=principal, is_super=False)
        with pytest.raises(TransactionNotFound):
            await coordinator.renew(txn, 1000, principal=principal, is_super=False)
    assert await bench.state(txn) == "OPEN"
    await coordinator.check(txn, "ann")
    await coordinator.check(txn, "root", is_super=True)
    await coordinator.new_sub(txn, principal="ann", is_super=False)
    await coordinator.renew(txn, 1000, principal="ann", is_super=False)
    await coordinator.end(txn, commit=True, principal="ann", is_super=False)
    with pytest.raises(TransactionNotFound):  # nor may others ask how it ended
        await coordinator.end(txn, commit=True, principal="bob", is_super=False)
    nobodys = await bench.begin()
    await coordinator.end(nobodys, commit=True, principal="bob", is_super=False)


@pytest.mark.req("R473-33")
async def test_adding_participants_writes_nothing(bench: Bench) -> None:
    txn = await bench.begin(owner="ann")
    seen = count_writes(bench)
    await bench.coordinator.check(txn, "ann")
    with pytest.raises(TransactionNotFound, match=str(txn.with_sub(3))):  # it has no sub-transactions
        await bench.coordinator.check(txn.with_sub(3), "ann")
    assert seen == []


@pytest.mark.req("R473-9")
@pytest.mark.parametrize("commit", [True, False])
@pytest.mark.parametrize("fault", [*UNKNOWN, Fault.CONFLICT])
async def test_end_settles_what_the_store_left_open(bench: Bench, fault: Fault, commit: bool) -> None:
    txn = await bench.begin()
    bench.faulty.plan(fault, "put", records.header_key(txn))
    await bench.coordinator.end(txn, commit=commit)
    assert bench.faulty.hits == {fault.value: 1}
    assert await bench.state(txn) == ("COMMITTED" if commit else "ABORTED")
    assert bench.coordinator.open_counts[0] == 0


async def test_end_says_unknown_only_if_reading_back_failed(bench: Bench) -> None:
    txn = await bench.begin()
    bench.faulty.plan(Fault.UNKNOWN_APPLIED, "put", records.header_key(txn))
    bench.faulty.plan(Fault.UNAVAILABLE, "get", records.header_key(txn), skip=1)
    with pytest.raises(OutcomeUnknown, match=f"Whether {txn} was decided is unknown"):
        await bench.coordinator.end(txn, commit=True)
    await bench.coordinator.end(txn, commit=True)
    refused = await bench.begin()
    bench.faulty.plan(Fault.UNAVAILABLE, "put", records.header_key(refused))
    with pytest.raises(StoreUnavailable):
        await bench.coordinator.end(refused, commit=True)
    assert await bench.state(refused) == "OPEN"


async def test_end_whose_record_was_collected_meanwhile_is_unknown(bench: Bench) -> None:
    txn = await bench.begin()
    bench.faulty.plan(Fault.UNKNOWN_APPLIED, "put", records.header_key(txn))
    read = bench.store.header

    async def collected(root: TxnId, *, fresh: bool = False) -> object:
        return None if fresh else await read(root)

    bench.store.header = collected  # type: ignore[assignment]
    with pytest.raises(OutcomeUnknown, match="its record was collected"):
        await bench.coordinator.end(txn, commit=True)


async def _rivalry(benches: list[Bench]) -> None:
    txn = await benches[0].begin()
    header = await benches[0].header(txn)

    async def attempt(number: int, kind: str) -> str | None:
        coordinator = benches[number % 3].coordinator
        if kind == "expire":
            return "ABORTED" if await coordinator.expire(header) else None
        try:
            await coordinator.end(txn, commit=kind == "commit")
        except InvalidTransactionStatus:
            return None
        return "COMMITTED" if kind == "commit" else "ABORTED"

    kinds = ["commit", "abort", "expire"]
    answers = await asyncio.gather(*[attempt(number // 3, kinds[number % 3]) for number in range(12)])
    assert {answer for answer in answers if answer is not None} == {await benches[0].state(txn)}
    record = await benches[0].faulty.get(records.header_key(txn), partition=str(txn))
    assert record is not None
    assert record.mods == 1


@pytest.mark.req("R473-8", "R473-47")
async def test_of_many_rivals_one_decides() -> None:
    """Commits, aborts and expiries from three brokers at once: every answer fits the one outcome."""
    async with brokers(3) as benches:
        for _round in range(20):
            await _rivalry(benches)
        assert sum(each.store.counters.header_cas["ok"] for each in benches) == 20


async def test_a_stale_read_is_settled_by_the_swap() -> None:
    """A handle that reads behind the others, as some stores' do."""
    async with brokers(2) as (one, two):
        txn = await one.begin()
        old = await one.header(txn)
        await two.coordinator.end(txn, commit=False)
        read = one.store.header

        async def behind(root: TxnId, *, fresh: bool = False) -> object:
            return await read(root, fresh=True) if fresh else old

        one.store.header = behind  # type: ignore[assignment]
        with pytest.raises(InvalidTransactionStatus):
            await one.coordinator.end(txn, commit=True)
        await one.coordinator.end(txn, commit=False)

        async def unseen(root: TxnId, *, fresh: bool = False) -> object:
            return await read(root, fresh=True) if fresh else None

        one.store.header = unseen  # type: ignore[assignment]
        await one.coordinator.end(txn, commit=False)


@pytest.mark.req("R473-45")
async def test_another_broker_goes_on_without_replay() -> None:
    """The first one dies between begin and end; nothing but the header is read."""
    async with brokers(2) as (one, two):
        txn = await one.begin()
        for _ in range(100):
            await one.store.append_op(txn, write())
        one.faulty.is_cut = True
        seen = two.store.counters.queries.counts.copy()
        await two.coordinator.end(txn, commit=True)
        assert await two.state(txn) == "COMMITTED"
        assert two.store.counters.queries.counts == seen
        await two.begin()


async def test_finalized_is_never_before_created(bench: Bench) -> None:
    """Clocks of two brokers differ."""
    made = await bench.begin()
    header = await bench.header(made)
    ahead = msgspec.structs.replace(header.value, created_ms=bench.clock.now_ms() + 5000)
    await bench.store.swap_header(header, ahead)
    await bench.coordinator.end(made, commit=True)
    assert (await bench.header(made)).value.finalized_ms == ahead.created_ms


async def test_describe_lists_what_is_not_materialised(bench: Bench) -> None:
    txn = await bench.begin(owner="ann")
    await bench.store.append_op(txn, write())
    await bench.store.append_op(txn, ack("s"))
    header, ops = await bench.coordinator.describe(txn)
    assert header.value.owner == "ann"
    assert [op.op.kind for op in ops] == ["write", "ack"]
    _header, ops = await bench.coordinator.describe(txn.with_sub(4), limit=1)
    assert len(ops) == 1


async def test_expire_leaves_what_was_renewed_or_decided(bench: Bench) -> None:
    txn = await bench.begin(is_decider=True)
    old = await bench.header(txn)
    await bench.coordinator.renew(txn, MINUTE_MS + 1)
    assert not await bench.coordinator.expire(old)
    assert await bench.state(txn) == "OPEN"
    with pytest.raises(VersionConflict):
        await bench.store.swap_header(old, old.value)
    assert await bench.coordinator.expire(await bench.header(txn))
    assert await bench.state(txn) == "ABORTED"
    assert bench.store.counters.timed_out == {0: 1}
