"""`CoordinatorPartitions`: every partition has one leader, everybody can tell which, and a dead one is replaced."""

import random
from collections.abc import AsyncIterator

import pytest

from braid.errors import ConfigError
from braid.metadata.api import MetadataStore
from braid.metadata.backends import memory
from braid.runtime.tasks import Tasks
from braid.testing.conformance.metadata_world import EngineWorld, until, while_time_passes
from braid.testing.faulty_metadata import Fault, FaultyMetadata
from braid.txn import records
from braid.txn.partitions import CoordinatorPartitions

COUNT = 4
RECONCILE = 2.0


@pytest.fixture
async def world() -> AsyncIterator[EngineWorld]:
    made = EngineWorld(memory.open_store, is_durable=False)
    yield made
    await made.close()


def partitions(
    world: EngineWorld, store: MetadataStore, name: str, *, run: str = "1", count: int = COUNT
) -> CoordinatorPartitions:
    return CoordinatorPartitions(
        store, world.clock, count, broker_id=f"{name}:8080", incarnation=run, reconcile_seconds=RECONCILE
    )


async def started(world: EngineWorld, name: str, *, run: str = "1") -> CoordinatorPartitions:
    made = partitions(world, await world.handle(), name, run=run)
    await while_time_passes(world, made.start())
    return made


async def test_first_broker_leads_all_and_the_others_know(world: EngineWorld) -> None:
    one, two = await started(world, "a"), await started(world, "b")
    assert one.snapshot() == two.snapshot() == dict.fromkeys(range(COUNT), "a:8080")
    assert all(one.leads(number) for number in range(COUNT))
    assert not any(two.leads(number) for number in range(COUNT))
    assert two.leader_of(3) == "a:8080"
    assert (one.parallelism, two.parallelism) == (COUNT, COUNT)
    for number in (-1, COUNT, 2**40):
        assert not one.leads(number)
        assert one.leader_of(number) is None
    record = await (await world.handle()).get("/txn-tc/leader/0")
    assert record is not None
    assert record.value == b'{"brokerId":"a:8080","incarnation":"1"}'
    await one.close()
    await two.close()


@pytest.mark.req("R473-45")
async def test_who_closes_hands_over_at_once(world: EngineWorld) -> None:
    one, two = await started(world, "a"), await started(world, "b")
    seen: list[dict[int, str]] = []
    stop = two.on_change(lambda: seen.append(two.snapshot()))
    await while_time_passes(world, one.close())
    passed = await until(world, lambda: all(two.leads(number) for number in range(COUNT)))
    assert passed < RECONCILE
    assert seen[-1] == dict.fromkeys(range(COUNT), "b:8080")
    stop()
    before = len(seen)
    await while_time_passes(world, two.close())
    assert len(seen) == before
    assert not any(one.leads(number) or two.leads(number) for number in range(COUNT))


@pytest.mark.req("R473-45")
async def test_a_killed_leader_is_replaced_when_its_session_ends(world: EngineWorld) -> None:
    store = await world.handle()
    one = partitions(world, store, "a")
    await while_time_passes(world, one.start())
    two = await started(world, "b")
    seen: list[dict[int, str]] = []
    two.on_change(lambda: seen.append(two.snapshot()))
    one.kill()
    await world.kill(store)
    await until(world, lambda: all(two.leads(number) for number in range(COUNT)))
    assert not any(one.leads(number) for number in range(COUNT))
    assert two.snapshot() == dict.fromkeys(range(COUNT), "b:8080")
    # While a partition has no leader it is left out, and listeners are told of each change.
    assert len(seen) >= COUNT
    await two.close()


async def test_a_restarted_broker_does_not_wait_for_its_own_session(world: EngineWorld) -> None:
    store = await world.handle()
    one = partitions(world, store, "a")
    await while_time_passes(world, one.start())
    one.kill()
    await world.kill(store)
    again = await started(world, "a", run="2")
    assert all(again.leads(number) for number in range(COUNT))
    await again.close()


async def test_two_brokers_never_lead_one_partition(world: EngineWorld) -> None:
    three = [await started(world, name) for name in "abc"]
    for leaver in (0, 1):
        closing = Tasks("test").spawn(three[leaver].close(), "close")
        while not closing.done():
            await world.advance(0.05)
            for number in range(COUNT):
                assert sum(each.leads(number) for each in three) <= 1
    await until(world, lambda: all(three[2].leads(number) for number in range(COUNT)))
    await three[2].close()


@pytest.mark.inv("INV15")
async def test_lost_watch_events_are_made_up_for(world: EngineWorld) -> None:
    """A broker that hears nothing campaigns all the same, and learns of another's win."""
    one, two = await started(world, "a"), await started(world, "b")
    deaf = FaultyMetadata(await world.handle(), world.clock, random.Random(1))
    deaf.faults.watch_drop = 1.0
    third = partitions(world, deaf, "c")
    await while_time_passes(world, third.start())
    await while_time_passes(world, one.close())
    await until(world, lambda: all(two.leads(number) for number in range(COUNT)))
    passed = await until(world, lambda: third.snapshot() == dict.fromkeys(range(COUNT), "b:8080"))
    assert passed <= RECONCILE + 0.2
    await while_time_passes(world, two.close())
    passed = await until(world, lambda: third.snapshot() == dict.fromkeys(range(COUNT), "c:8080"))
    assert passed <= 2 * RECONCILE + 0.2
    assert deaf.hits["watch drop"] > 0
    await third.close()


async def test_an_own_win_is_shown_at_once(world: EngineWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the watch nor the comparison is needed for it."""
    one = await started(world, "a")
    deaf = FaultyMetadata(await world.handle(), world.clock, random.Random(1))
    deaf.faults.watch_drop = 1.0
    two = partitions(world, deaf, "b")
    await while_time_passes(world, two.start())

    async def nothing() -> None:
        return

    monkeypatch.setattr(two, "_reload", nothing)
    await while_time_passes(world, one.close())
    await until(world, lambda: all(two.leads(number) for number in range(COUNT)))
    assert two.snapshot() == dict.fromkeys(range(COUNT), "b:8080")
    await two.close()


async def test_the_number_is_fixed_by_the_first_broker(world: EngineWorld) -> None:
    one = await started(world, "a")
    store = await world.handle()
    record = await store.get(records.PARALLELISM)
    assert record is not None
    assert record.value == b"4"
    other = partitions(world, store, "b", count=8)
    with pytest.raises(ConfigError, match=r"transactions\.coordinators is 8 here, but 4 was fixed .* set it to 4\."):
        await other.start()
    assert await store.get("/txn-tc/leader/7") is None
    await one.close()


@pytest.mark.parametrize("fault", [Fault.CONFLICT, Fault.UNKNOWN_APPLIED, Fault.UNKNOWN_DROPPED])
async def test_bad_luck_when_the_number_is_written(world: EngineWorld, fault: Fault) -> None:
    store = FaultyMetadata(await world.handle(), world.clock, random.Random(1))
    store.plan(fault, "put", records.PARALLELISM)
    one = partitions(world, store, "a")
    await while_time_passes(world, one.start())
    assert store.hits == {fault.value: 1}
    assert one.leads(0)
    await one.close()


async def test_a_record_that_nobody_understands_is_left_out(world: EngineWorld) -> None:
    store = await world.handle()
    await store.put("/txn-tc/leader/1", b"nonsense", ephemeral=True)
    await store.put("/txn-tc/leader/elsewhere", b'{"brokerId":"x"}', ephemeral=True)
    one = await started(world, "a")
    assert one.snapshot() == {0: "a:8080", 2: "a:8080", 3: "a:8080"}
    await one.close()
