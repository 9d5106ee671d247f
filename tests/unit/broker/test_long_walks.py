"""Work over many entries or many topics: it costs what it has to, or lets clients have their turn."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tests.steps import Steps

from braid.broker.cursor_acks import acknowledge_around
from braid.broker.policy_watch import PolicyWatch
from braid.broker.retention import MAX_TOLD, TopicRetention
from braid.errors import StoreUnavailable
from braid.managedledger.config import ManagedLedgerConfig
from braid.model.names import TopicName
from braid.model.positions import Position
from braid.model.retention import NextTrim
from braid.model.txn import TxnId
from braid.txn.ack_conflicts import WHOLE, Hold, Holds

TOPIC = "persistent://public/default/walks"
TXN, OTHER = TxnId(1, 1 << 20), TxnId(1, 2 << 20)


async def filled(broker: Any, count: int) -> tuple[Any, list[Position]]:
    client = await broker.client(answers_pings=True)
    await client.producer(TOPIC)
    positions = [await client.store(b"x", number) for number in range(count)]
    client.close()
    return broker.topic(TOPIC).log, positions


def entry_by_entry(log: Any, cursor: Any, holds: Holds, position: Position, mask: int | None) -> None:
    """What a plain cumulative acknowledgment means."""
    at = cursor.mark_delete
    while (at := log.position_after(at)) < position or (at == position and not mask):
        bits = holds.held_bits(at)
        if not bits:
            cursor.acknowledge([at])
        elif bits != WHOLE:
            cursor.acknowledge_batch(at, bits)
    if mask and (bits := holds.held_bits(position)) != WHOLE and position > cursor.mark_delete:
        cursor.acknowledge_batch(position, mask | bits)


@pytest.mark.inv("INV14")
async def test_a_cumulative_ack_around_holds_means_what_it_means_entry_by_entry(world: Any) -> None:
    broker = await world.broker(logs=ManagedLedgerConfig(max_entries_per_ledger=7, min_ledger_age_ms=0))
    log, positions = await filled(broker, 24)
    await log.open_cursor("keeps everything", initial="earliest")
    for seed in range(150):
        rng = random.Random(seed)
        one = await log.open_cursor(f"one-{seed}", initial="earliest")
        two = await log.open_cursor(f"two-{seed}", initial="earliest")
        holds = Holds()
        for _number in range(rng.randint(0, 4)):
            holds.add(TXN, Hold(rng.choice(positions), rng.choice([WHOLE, 0b1, 0b110]), False))
        if rng.random() < 0.3:
            holds.add(OTHER, Hold(rng.choice(positions), rng.choice([WHOLE, 0b11]), True))
        done = rng.sample(positions, rng.randint(0, 5))
        for _step in range(3):
            position, mask = rng.choice(positions), rng.choice([None, None, 0b100])
            for cursor in (one, two):
                cursor.acknowledge([each for each in done if not holds.held_bits(each)])
            acknowledge_around(log, one, holds, position, mask)
            if holds:
                entry_by_entry(log, two, holds, position, mask)
            else:
                two.acknowledge_cumulative(position, mask)
            for each in positions:
                assert one.is_acknowledged(each) == two.is_acknowledged(each), (seed, each)
                assert one.unacked_mask(each) == two.unacked_mask(each), (seed, each)
            assert one.mark_delete == two.mark_delete
            assert one.consumed == two.consumed


@pytest.mark.parametrize("held", ["one", "up to"])
async def test_a_cumulative_ack_around_holds_takes_no_step_for_each_entry(world: Any, held: str) -> None:
    broker = await world.broker()
    log, positions = await filled(broker, 300)
    costs = []
    for last in (20, 299):
        holds = Holds()
        holds.add(TXN, Hold(positions[3], WHOLE, held == "up to"))
        cursor = await log.open_cursor(f"s{last}", initial="earliest")
        with Steps() as steps:
            acknowledge_around(log, cursor, holds, positions[last], None)
        assert cursor.backlog() == 300 - last + (0 if held == "one" else 3)
        costs.append(steps.total)
    assert costs[1] < 1.5 * costs[0]


async def test_trimming_many_topics_lets_clients_have_their_turn(world: Any) -> None:
    broker = await world.broker()
    longest = []
    for count in (80, 400):
        for number in range(len(broker.service.topics), count):
            await broker.service.topic(TopicName.parse(f"persistent://public/default/many-{number}"), create=True)
        with Steps() as steps:
            await broker.service.retention.trim()
        longest.append(steps.longest)
    assert longest[1] < 2 * longest[0]


async def test_trims_that_fail_for_the_same_reason_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of thousands of topics, every two minutes, while the metadata store is away."""

    async def trim() -> None:
        raise StoreUnavailable("The metadata store does not answer.")

    log = SimpleNamespace(roll_if_needed=lambda: None, trim=trim, next_trim=NextTrim)
    names = [TopicName.parse(f"persistent://public/default/many-{number}") for number in range(1000)]
    topics: Any = {str(name): SimpleNamespace(name=name, is_closing=False, log=log) for name in names}
    nothing: Any = None
    await TopicRetention(nothing, topics, nothing, nothing, seconds=1).trim()
    assert [line.partition(" failed")[0] for line in caplog.messages] == [
        *(f"trimming {name}" for name in names[:MAX_TOLD]),
        f"trimming {1000 - MAX_TOLD} more topics",
    ]
    assert all("does not answer" in line for line in caplog.messages)


async def test_comparing_the_policies_of_many_namespaces_looks_at_the_topics_once() -> None:
    class Namespaces:
        async def policies(self, _namespace: Any) -> Any:
            return SimpleNamespace(version=1)

    async def looked(namespaces: int) -> Steps:
        names = [TopicName.parse(f"persistent://public/n{number}/topic") for number in range(namespaces)]
        topics = {str(name): SimpleNamespace(name=name) for name in names}
        watch = PolicyWatch(SimpleNamespace(topics=topics, namespaces=Namespaces()))  # type: ignore[arg-type]
        for name in names:
            watch.applied(name.namespace, 1)
        with Steps("broker") as steps:
            await watch.compare()
        return steps

    few, many = await looked(100), await looked(800)
    assert many.total < 10 * few.total
    assert many.longest < 8 * few.longest
