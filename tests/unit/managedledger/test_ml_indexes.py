"""From message indexes to entries and back, held against the entries themselves; how much is read for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from braid.errors import DataLost
from braid.managedledger.config import ManagedLedgerConfig
from braid.managedledger.indexes import MAX_BOUNDARIES, LogIndexes
from braid.managedledger.log import ManagedLedger
from braid.model.positions import EARLIEST, Position
from braid.wire.entries import build_entry
from braid.wire.messages import MessageMetadata

Spans = list[tuple[int, int]]
"""Of each entry, its first and last message."""


class Counted(LogIndexes):
    """Counts the entries that it reads."""

    reads = 0

    async def _entry(self, ordinal: int) -> Any:
        self.reads += 1
        return await super()._entry(ordinal)


async def filled(
    world: Any, sizes: list[int], entries_per_ledger: int = 5, step_ms: int = 0, payloads: list[int] | None = None
) -> tuple[ManagedLedger, Spans]:
    config = ManagedLedgerConfig(max_entries_per_ledger=entries_per_ledger, min_ledger_age_ms=0)
    log, listener = await world.open(config=config)
    await log.open_cursor("keeps everything", initial="earliest")
    spans: Spans = []
    for number, messages in enumerate(sizes):
        world.clock.advance(step_ms)
        log.add(_body(number, messages, payloads[number] if payloads else 0), messages, number)
        await listener.until(number + 1)
        first = spans[-1][1] + 1 if spans else 0
        spans.append((first, first + messages - 1))
    return log, spans


def _body(number: int, messages: int, payload: int = 0) -> bytes:
    metadata = MessageMetadata(producer_name="p", sequence_id=number, publish_time=1)
    if messages > 1:
        metadata.num_messages_in_batch = messages
    return build_entry(metadata, b"%d" % number + bytes(payload))


def ordinal_of(spans: Spans, index: int) -> int:
    return next(number for number, (first, last) in enumerate(spans) if first <= index <= last)


@pytest.mark.parametrize("seed", range(12))
async def test_every_index_is_found(world: Any, seed: int) -> None:
    chance = random.Random(seed)
    kinds: list[list[int]] = [[1], [7], [1, 2, 3], [1, 1, 1, 200]]
    sizes = [chance.choice(kinds[seed % 4]) for _ in range(chance.randrange(1, 60))]
    log, spans = await filled(world, sizes, chance.randrange(2, 12))
    for turn in range(2):
        each = log if turn == 0 else (await world.open(create=False))[0]
        indexes = LogIndexes(each)
        assert (await indexes.low(), indexes.end) == (0, sum(sizes))
        for index in chance.sample(range(sum(sizes)), min(60, sum(sizes))):
            assert await indexes.find(index) - each.map.start == ordinal_of(spans, index)
        assert await indexes.find(sum(sizes)) == each.map.end
        for number, (_first, last) in enumerate(spans):
            position = each.map.at(each.map.start + number)
            assert await indexes.after(position) == last + 1
        assert await indexes.after(EARLIEST) == 0
        assert await indexes.after(Position(1 << 60, 0)) == sum(sizes)


async def test_few_entries_are_read_for_it(world: Any) -> None:
    chance = random.Random(5)
    for kinds, allowed in (([1], 1), ([10], 3), ([1, 2, 50], 22)):
        sizes = [chance.choice(kinds) for _ in range(1500)]
        log, spans = await filled(world, sizes, 10_000)
        indexes = Counted(log)
        await indexes.low()
        for index in chance.sample(range(sum(sizes)), 50):
            indexes.reads = 0
            assert await indexes.find(index) == ordinal_of(spans, index) + log.map.start
            assert indexes.reads <= allowed
        await log.delete()


async def test_where_a_reader_stopped_is_remembered_within_bounds(world: Any) -> None:
    log, _spans = await filled(world, [3] * 20, 10_000)
    indexes = Counted(log)
    await indexes.low()
    indexes.reads = 0
    indexes.remember(30, 10)
    assert await indexes.find(30) == 10
    assert indexes.reads == 0
    for number in range(MAX_BOUNDARIES):
        indexes.remember(1000 + number, 1)
    assert await indexes.find(30) == 10
    assert indexes.reads, "the oldest was forgotten"
    assert len(indexes._boundaries) == MAX_BOUNDARIES


async def test_what_is_trimmed_is_told_with_what_is_left(world: Any) -> None:
    log, spans = await filled(world, [2, 3, 1, 4, 2] * 4)
    indexes = LogIndexes(log)
    assert await indexes.low() == 0
    assert await indexes.find(1) == 0
    cursor = await log.open_cursor("keeps everything", initial="earliest")
    cursor.acknowledge_cumulative(log.map.at(7))
    await log.trim()
    left = log.map.start
    assert left > 0
    low = spans[left][0]
    assert await indexes.low() == low
    assert await indexes.find(low) == left
    for index in (0, 1, low - 1):
        with pytest.raises(DataLost) as refused:
            await indexes.find(index)
        assert refused.value.low == low
    assert await indexes.after(EARLIEST) == low
    assert await indexes.at_time(0) == low
    cursor.acknowledge_cumulative(log.last_position)
    await log.trim()
    assert await indexes.low() <= indexes.end
    empty, _listener = await world.open("t/ns/persistent/empty")
    of_empty = LogIndexes(empty)
    assert (await of_empty.low(), of_empty.end, await of_empty.find(0), await of_empty.at_time(0)) == (0, 0, 0, 0)


async def test_times(world: Any) -> None:
    log, spans = await filled(world, [2, 3, 1] * 10, step_ms=1000)
    start = world.clock.ms - 29_000
    indexes = LogIndexes(log)
    for number, (first, _last) in enumerate(spans):
        assert await indexes.at_time(start + 1000 * number) == first
        assert await indexes.at_time(start + 1000 * number - 999) == first
    assert await indexes.at_time(world.clock.ms + 1) == indexes.end


def by_naive_sum(spans: Spans, sizes: list[int], start: int, stop: int, max_bytes: int) -> int:
    """Entry by entry: the first one counts whatever it takes."""
    number = ordinal_of(spans, start)
    end, left = spans[number][1] + 1, max_bytes - sizes[number]
    for (_first, last), size in list(zip(spans, sizes, strict=True))[number + 1 :]:
        left -= size
        if left < 0:
            break
        end = last + 1
    return min(end, stop)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("per_ledger", [1, 7, 1000])
async def test_bytes_are_counted_to_the_entry(world: Any, seed: int, per_ledger: int) -> None:
    chance = random.Random(f"{seed} {per_ledger}")
    kinds: list[list[int]] = [[1], [50], [0, 3000], [1, 1, 1, 100_000], [*range(0, 4000, 97)]]
    payloads = chance.choice(kinds)
    counts = [chance.choice([1, 1, 5]) for _ in range(60)]
    log, spans = await filled(world, counts, per_ledger, payloads=[chance.choice(payloads) for _ in counts])
    sizes = []
    for ordinal in range(log.map.start, log.map.end):
        sizes += [len(each) for each in (await log.read_stored(log.map.at(ordinal), 1, 1))[1]]
    assert sum(sizes) == log.total_size
    indexes = Counted(log)
    end = indexes.end
    limits = [0, 1, sizes[0], sum(sizes), sum(sizes) - 1, 1 << 40]
    for _ in range(150):
        start = chance.randrange(end)
        stop = chance.choice([end, chance.randint(start + 1, end), start + 1])
        limit = chance.choice([*limits, chance.randrange(sum(sizes)), chance.randrange(2 * max(sizes))])
        expected = by_naive_sum(spans, sizes, start, stop, limit)
        indexes.reads = 0
        assert await indexes.by_bytes(start, stop, limit) == expected, (start, stop, limit)
        assert indexes.reads <= 16, "entries are looked up, not read one after the other"


async def test_bytes_of_a_log_that_was_loaded_again_and_trimmed(world: Any) -> None:
    log, spans = await filled(world, [1] * 40, 6, payloads=[(37 * number) % 900 for number in range(40)])
    await log.close()
    log, listener = await world.open(config=ManagedLedgerConfig(max_entries_per_ledger=6, min_ledger_age_ms=0))
    log.add(_body(40, 2, 77), 2, 40)
    await listener.until(1)
    spans.append((40, 41))
    sizes = [len((await log.read_stored(log.map.at(ordinal), 1, 1))[1][0]) for ordinal in range(log.map.start, log.map.end)]
    indexes = LogIndexes(log)
    for start in range(0, 42, 3):
        for limit in (0, 300, 1000, 5000, 50_000):
            assert await indexes.by_bytes(start, 42, limit) == by_naive_sum(spans, sizes, start, 42, limit)
    log.cursors["keeps everything"].acknowledge_cumulative(log.map.at(log.map.start + 13))
    await log.trim()
    with pytest.raises(DataLost):
        await indexes.by_bytes(0, 42, 1000)
    assert await indexes.by_bytes(13, 42, 1000) == by_naive_sum(spans, sizes, 13, 42, 1000)
