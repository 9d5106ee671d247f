"""What cursors cost: no step for each entry that is passed over, none for each that is kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tests.steps import Steps
from tests.unit.managedledger.test_ml_cursor import filled, rest

from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.ledger_map import LedgerMap
from braid.model.positions import Position

ONE_LEDGER = ManagedLedgerConfig()


def laid_out(counts: list[int]) -> LedgerMap:
    found = LedgerMap()
    for number, count in enumerate(counts):
        found.append(10 + 3 * number, count)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_runs_name_every_entry_between_two_positions_once(seed: int) -> None:
    rng = random.Random(seed)
    ledgers = laid_out([rng.choice([0, 0, 1, 2, 5]) for _number in range(rng.randint(0, 6))])
    everything = [ledgers.at(ordinal) for ordinal in range(ledgers.end)]
    for _try in range(30):
        after, upto = (Position(rng.randint(8, 30), rng.randint(-1, 6)) for _ in range(2))
        runs = list(ledgers.runs(after, upto))
        named = [Position(ledger_id, entry) for ledger_id, first, last in runs for entry in range(first, last + 1)]
        assert named == [each for each in everything if after < each <= upto]
        assert len({ledger_id for ledger_id, _first, _last in runs}) == len(runs)


@pytest.mark.parametrize("seed", range(10))
async def test_whole_spans_are_acknowledged_like_their_entries(world: Any, kit: Any, seed: int) -> None:
    rng = random.Random(seed)
    log, cursor, positions = await filled(
        world, kit, 20, config=ManagedLedgerConfig(max_entries_per_ledger=6, min_ledger_age_ms=0)
    )
    other = await log.open_cursor("other", initial="earliest")
    for one in (cursor, other):
        spread = random.Random(seed)
        one.acknowledge(spread.sample(positions, 4))
        for position in spread.sample(positions, 4):
            one.acknowledge_batch(position, 0b101)
    for _try in range(4):
        spans = [tuple(sorted(rng.sample(range(20), 2))) for _number in range(rng.randint(0, 3))]
        cursor.acknowledge_spans([(positions[first], positions[last]) for first, last in spans])
        other.acknowledge([positions[each] for first, last in spans for each in range(first + 1, last + 1)])
        for position in positions:
            assert cursor.is_acknowledged(position) == other.is_acknowledged(position)
            assert cursor.unacked_mask(position) == other.unacked_mask(position)
        assert (cursor.mark_delete, cursor.consumed) == (other.mark_delete, other.consumed)
        assert cursor.backlog() == other.backlog()
        assert await rest(cursor) == await rest(other)


async def test_a_span_costs_no_more_because_it_is_long(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit, 400, config=ONE_LEDGER)
    costs = []
    for first, last in ((1, 10), (20, 350)):
        with Steps() as steps:
            cursor.acknowledge_spans([(positions[first], positions[last])])
        costs.append(steps.total)
    assert costs[1] < 2 * costs[0]
    assert cursor.backlog() == 400 - 9 - 330


@pytest.mark.parametrize("way", ["one by one", "cumulatively"])
async def test_moving_on_does_not_look_at_the_partly_acknowledged_ones_behind(world: Any, kit: Any, way: str) -> None:
    costs = []
    log, listener = await world.open(config=ONE_LEDGER)
    await kit.fill(log, listener, range(800))
    positions = [Position(entry.ledger_id, entry.entry_id) for entry, _ in listener.added]
    for count in (100, 800):
        cursor = await log.open_cursor(f"s{count}", initial="earliest")
        for position in positions[:count]:
            cursor.acknowledge_batch(position, 0b1)
        with Steps() as steps:
            for position in positions[:50]:
                if way == "one by one":
                    cursor.acknowledge([position])
                else:
                    cursor.acknowledge_cumulative(position)
        assert cursor.mark_delete == positions[49]
        assert [each for each in positions if cursor.unacked_mask(each) is not None] == positions[50:count]
        costs.append(steps.total)
    assert costs[1] < 2 * costs[0]


async def test_reading_on_passes_over_what_is_acknowledged_in_one_step(world: Any, kit: Any) -> None:
    _log, cursor, positions = await filled(world, kit, 600, config=ONE_LEDGER)
    costs = []
    for first, last in ((1, 20), (21, 580)):
        cursor.acknowledge_spans([(positions[first], positions[last])])
        cursor.read_position = positions[first]
        with Steps() as steps:
            while entries := cursor.read_cached(5, 1 << 20):
                if entries[-1].entry_id >= positions[last].entry_id:
                    break
        costs.append(steps.total)
    assert costs[1] < 2 * costs[0]
