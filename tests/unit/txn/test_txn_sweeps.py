"""`TransactionSweeps`: deadlines abort, ended transactions go when nothing of them is left, and nothing is forced."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from tests.unit.txn.coordination_bench import MINUTE_MS, SEGMENT, Bench, ack, brokers, write

from braid.errors import NotReady
from braid.metadata.api import Span
from braid.model.txn import TxnId
from braid.testing.conformance.metadata_world import collect_names, until, while_time_passes
from braid.testing.faulty_metadata import Fault
from braid.txn import records
from braid.txn.config import TransactionConfig
from braid.txn.partitions import CoordinatorPartitions
from braid.txn.sweeps import AT_ONCE, TransactionSweeps

OTHER = "persistent://public/default/other"
CONFIG = TransactionConfig(timeout_sweep_seconds=1, collect_seconds=10, retention_seconds=60)


class Swept(Bench):
    """A broker that leads partition 0 as long as the test says so."""

    is_leading = True
    load: Callable[[str], Awaitable[bool]]

    @property
    def sweeps(self) -> TransactionSweeps:
        return self._sweeps

    def set_up(self) -> None:
        self.loaded: list[str] = []

        async def load(segment: str) -> bool:
            self.loaded.append(segment)
            return await self.load(segment)

        self._sweeps = TransactionSweeps(
            self.store,
            self.coordinator,
            self,  # type: ignore[arg-type]
            self.clock,
            self.config,
            load,
            self.sinks,
        )

    def leads(self, number: int) -> bool:
        return number == 0 and self.is_leading

    async def headers(self) -> list[str]:
        return await collect_names(self.faulty.inner.names(Span(records.HEADERS)))

    async def finish(self, *, commit: bool = True, is_decider: bool = False) -> TxnId:
        txn = await self.begin(is_decider=is_decider)
        await self.coordinator.end(txn, commit=commit)
        return txn


async def _is_there(_segment: str) -> bool:
    return True


async def _is_gone(_segment: str) -> bool:
    return False


@asynccontextmanager
async def swept(count: int = 1, config: TransactionConfig = CONFIG) -> AsyncIterator[list[Swept]]:
    async with brokers(count, config) as benches:
        for bench in benches:
            bench.__class__ = Swept
            assert isinstance(bench, Swept)
            bench.load = _is_there
            bench.set_up()
        yield benches  # type: ignore[misc]
        for bench in benches:
            assert isinstance(bench, Swept)
            await bench.sweeps.close()


# Deadlines.


@pytest.mark.req("R473-35", "R473-15")
async def test_open_transactions_are_aborted_at_their_deadline() -> None:
    async with swept() as (bench,):
        short = await bench.coordinator.new(3, 3_000, owner=None)
        long = await bench.coordinator.new(0, 30_000, owner=None)
        done = await bench.coordinator.new(0, 3_000, owner=None)
        await bench.coordinator.end(done, commit=True)
        await bench.world.advance(2.99)
        assert await bench.sweeps.abort_expired() == 0
        await bench.world.advance(0.011)
        assert await bench.sweeps.abort_expired() == 1
        assert [await bench.state(txn) for txn in (short, long, done)] == ["ABORTED", "OPEN", "COMMITTED"]
        header = (await bench.header(short)).value
        assert header.finalized_ms == bench.clock.now_ms()
        assert bench.store.counters.timed_out == {3: 1}
        assert await bench.sweeps.abort_expired() == 0


@pytest.mark.req("R473-35")
async def test_deadlines_are_kept_in_the_background_within_the_sweeps_rhythm() -> None:
    async with swept() as (bench,):
        bench.sweeps.start()
        txn = await bench.coordinator.new(0, 3_000, owner=None)
        began = bench.clock.now_ms()
        while await bench.state(txn) == "OPEN":
            await bench.world.advance(0.1)
        passed = bench.clock.now_ms() - began
        assert 3_000 <= passed <= 4_200


async def test_a_renewed_decider_lives_on() -> None:
    async with swept() as (bench,):
        txn = await bench.coordinator.new(0, 3_000, owner=None, is_decider=True)
        for _ in range(5):
            await bench.world.advance(2.5)
            await bench.coordinator.renew(txn, 3_000)
            assert await bench.sweeps.abort_expired() == 0
        await bench.world.advance(3.1)
        assert await bench.sweeps.abort_expired() == 1
        assert await bench.state(txn) == "ABORTED"


async def test_only_the_leader_of_partition_zero_sweeps() -> None:
    async with swept(2) as (one, two):
        two.is_leading = False
        txn = await one.coordinator.new(0, 1, owner=None)
        ended = await one.finish()
        await one.world.advance(100)
        assert await two.sweeps.abort_expired() == await two.sweeps.collect() == 0
        assert await one.state(txn) == "OPEN"
        two.is_leading = True
        assert await two.sweeps.abort_expired() == 1
        assert await two.sweeps.collect() == 1
        assert await one.headers() == [str(txn)]
        assert str(ended) not in await one.headers()


async def test_two_brokers_that_believe_to_lead_do_no_harm() -> None:
    async with swept(2) as (one, two):
        for _ in range(20):
            await one.coordinator.new(0, 1, owner=None)
        await one.world.advance(1)
        first = one.sweeps.abort_expired()
        second = two.sweeps.abort_expired()
        assert await first + await second == 20
        await one.world.advance(61)
        assert await one.sweeps.collect() + await two.sweeps.collect() == 20
        assert await one.headers() == []


async def test_many_at_once_and_who_stops_leading_stops() -> None:
    async with swept() as (bench,):
        for _ in range(3 * AT_ONCE):
            await bench.coordinator.new(0, 1, owner=None)
        await bench.world.advance(1)
        expire = bench.coordinator.expire
        done = 0

        async def counting(header: object) -> bool:
            nonlocal done
            done += 1
            bench.is_leading = done < AT_ONCE + 1
            return await expire(header)  # type: ignore[arg-type]

        bench.coordinator.expire = counting  # type: ignore[method-assign]
        assert await bench.sweeps.abort_expired() == 2 * AT_ONCE
        bench.is_leading = True
        bench.coordinator.expire = expire  # type: ignore[method-assign]
        assert await bench.sweeps.abort_expired() == AT_ONCE


@pytest.mark.parametrize("fault", list(Fault))
async def test_one_that_fails_does_not_keep_the_others(fault: Fault) -> None:
    async with swept() as (bench,):
        made = [await bench.coordinator.new(0, 1, owner=None) for _ in range(3)]
        await bench.world.advance(1)
        bench.faulty.plan(fault, "put", records.header_key(made[0]))
        assert await bench.sweeps.abort_expired() == 2
        await bench.sweeps.abort_expired()
        await bench.world.advance(1)
        assert {await bench.state(txn) for txn in made} == {"ABORTED"}


async def test_one_that_cannot_be_read_does_not_keep_the_others() -> None:
    async with swept() as (bench,):
        broken, other = [await bench.coordinator.new(0, 1, owner=None) for _ in range(2)]
        index = {records.TXN_BY_DEADLINE: records.padded(0)}
        await bench.faulty.inner.put(records.header_key(broken), b"not a header", partition=str(broken), index=index)
        await bench.world.advance(1)
        assert await bench.sweeps.abort_expired() == 1
        assert await bench.state(other) == "ABORTED"


async def test_sweeps_survive_a_store_that_is_away() -> None:
    async with swept() as (bench,):
        bench.sweeps.start()
        txn = await bench.coordinator.new(0, 1_000, owner=None)
        bench.faulty.is_cut = True
        await bench.world.advance(5)
        bench.faulty.is_cut = False
        for _ in range(30):
            await bench.world.advance(0.1)
        assert await bench.state(txn) == "ABORTED"


# Collection.


@pytest.mark.req("R473-21", "R473-16")
@pytest.mark.parametrize("commit", [True, False])
async def test_ended_transactions_go_after_the_retention(commit: bool) -> None:
    async with swept() as (bench,):
        txn = await bench.finish(commit=commit)
        open_one = await bench.begin()
        await bench.world.advance(59.9)
        assert await bench.sweeps.collect() == 0
        await bench.coordinator.end(txn, commit=commit)  # can still be asked for
        await bench.world.advance(0.2)
        assert await bench.sweeps.collect() == 1
        assert await bench.headers() == [str(open_one)]


@pytest.mark.req("R473-21")
async def test_a_header_stays_as_long_as_one_of_its_ops() -> None:
    """The owner of the segment is asked to load it, and nothing is deleted in its place."""
    async with swept() as (bench,):
        txn = await bench.finish()
        ops = [await bench.store.append_op(txn, op) for op in (write(), write(), ack("s"), write(OTHER))]
        await bench.world.advance(61)
        for _ in range(2):
            bench.loaded.clear()
            assert await bench.sweeps.collect() == 0
            assert sorted(bench.loaded) == sorted([SEGMENT, OTHER])
        assert await bench.store.ops(txn) == ops
        assert await bench.state(txn) == "COMMITTED"

        async def materialise(segment: str) -> bool:
            for op in await bench.store.ops(txn):
                if op.op.segment == segment:
                    await bench.store.delete_op(op)
            return True

        bench.load = materialise
        assert await bench.sweeps.collect() == 0
        assert await bench.sweeps.collect() == 1
        assert await bench.headers() == []


@pytest.mark.req("R473-21")
async def test_ops_of_a_topic_that_does_not_exist_go() -> None:
    async with swept() as (bench,):
        txn = await bench.finish()
        await bench.store.append_op(txn, write())
        stays = await bench.store.append_op(txn, write(OTHER))
        await bench.world.advance(61)

        async def load(segment: str) -> bool:
            return segment == OTHER

        bench.load = load
        assert await bench.sweeps.collect() == 0
        assert await bench.store.ops(txn) == [stays]
        bench.load = _is_gone
        assert await bench.sweeps.collect() == 0
        assert await bench.sweeps.collect() == 1


async def test_a_segment_that_cannot_be_loaded_keeps_its_ops_and_no_others() -> None:
    async with swept() as (bench,):
        stuck, fine = await bench.finish(commit=False), await bench.finish()
        await bench.store.append_op(stuck, write())
        await bench.store.append_op(fine, write(OTHER))

        async def load(segment: str) -> bool:
            if segment == SEGMENT:
                raise NotReady("The owner is away.")
            return False

        bench.load = load
        await bench.world.advance(61)
        await bench.sweeps.collect()
        assert await bench.sweeps.collect() == 1
        assert await bench.headers() == [str(stuck)]


async def test_stuck_transactions_do_not_starve_the_others() -> None:
    async with swept() as (bench,):
        for _ in range(2 * AT_ONCE):
            txn = await bench.finish(commit=False)
            await bench.store.append_op(txn, write())
        for _ in range(AT_ONCE):
            await bench.finish()
        await bench.world.advance(61)
        assert await bench.sweeps.collect() == AT_ONCE
        assert bench.loaded == [SEGMENT]
        assert len(await bench.headers()) == 2 * AT_ONCE


async def test_sub_numbers_go_before_their_header() -> None:
    async with swept() as (bench,):
        txn = await bench.begin(is_decider=True)
        sub = await bench.coordinator.new_sub(txn)
        await bench.coordinator.decide(txn, [sub.sub])
        await bench.world.advance(61)
        bench.faulty.plan(Fault.UNAVAILABLE, "delete", records.header_key(txn))
        assert await bench.sweeps.collect() == 0
        assert await collect_names(bench.faulty.names(Span(records.subs_of(txn)))) == []
        assert await bench.sweeps.collect() == 1
        assert await bench.headers() == []


async def test_collection_runs_in_the_background_and_open_counts_follow() -> None:
    async with swept(2) as (one, two):
        two.is_leading = False
        one.sweeps.start()
        two.sweeps.start()
        txn = await one.finish()
        await one.coordinator.new(4, 3 * MINUTE_MS, owner=None)
        await until(one.world, lambda: two.coordinator.open_counts[4] == 1, step=1.0)
        began = one.clock.now_ms()
        while str(txn) in await one.headers():
            await one.world.advance(1)
        assert one.clock.now_ms() - began <= 72_000


async def test_with_real_elections_another_leader_goes_on() -> None:
    async with brokers(2, CONFIG) as benches:
        made = []
        for number, bench in enumerate(benches):
            partitions = CoordinatorPartitions(
                bench.faulty, bench.clock, 2, broker_id=f"b{number}", incarnation="1", reconcile_seconds=2
            )
            await while_time_passes(bench.world, partitions.start())
            sweeps = TransactionSweeps(
                bench.store, bench.coordinator, partitions, bench.clock, bench.config, _is_there, bench.sinks
            )
            sweeps.start()
            made.append((partitions, sweeps))
        one, two = benches
        partitions, sweeps = made[0]
        sweeps.kill()
        partitions.kill()
        await one.world.kill(one.faulty.inner)
        txn = await two.coordinator.new(0, 1_000, owner=None)

        async def is_aborted() -> None:
            while await two.state(txn) == "OPEN":
                await two.clock.sleep(0.5)

        await while_time_passes(two.world, is_aborted())
        assert made[1][0].leads(0)
        await made[1][1].close()
        await while_time_passes(two.world, made[1][0].close())
