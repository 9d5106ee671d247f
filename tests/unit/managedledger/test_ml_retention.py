"""Retention of a log: what no subscription has read, what open transactions wrote, and what is told of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from braid.managedledger.records import LedgerInfo
from braid.managedledger.retention import MEGABYTE, Fate, Limits, fates
from braid.model.positions import EARLIEST, LATEST, Position

MINUTE = 60_000
DAY = 24 * 60
WEEK = Limits(0, 0, 7 * DAY)


def ledger(number: int, last_append: int, closed: int, size: int = 10) -> LedgerInfo:
    return LedgerInfo(ledger_id=number, entries=10, size=size, timestamp=closed, last_append_ms=last_append)


@pytest.mark.parametrize(
    ("limits", "subscribed", "now_minutes", "expected"),
    [
        (Limits(0, 0, 10), False, 11, Fate(False, "unread", 11 * MINUTE + 1)),
        (Limits(0, 0, 10), False, 12, Fate(True, "unread", 5 * MINUTE + 1)),
        (Limits(0, 0, -1), False, 10**6, Fate(False, "unread")),
        (Limits(0, 0, 0), False, 6, Fate(True, "read", 5 * MINUTE + 1)),
        (Limits(0, 0, 10), True, 6, Fate(True, "read", 5 * MINUTE + 1)),
        (Limits(3, -1, 0), False, 6, Fate(False, "time", 8 * MINUTE + 1)),
        (Limits(3, -1, 0), False, 9, Fate(True, "time", 8 * MINUTE + 1)),
        (Limits(-1, 1, 0), False, 9, Fate(False, "size")),
        (Limits(-1, 0, 0), False, 9, Fate(True, "size")),
        (Limits(-1, -1, 0), False, 10**6, Fate(False, "size")),
        (Limits(30, -1, 10), False, 20, Fate(False, "time", 35 * MINUTE + 1)),  # the longer one counts
    ],
)
def test_what_becomes_of_the_oldest_ledger(limits: Limits, subscribed: bool, now_minutes: int, expected: Fate) -> None:
    """It was appended to until minute 1 and closed in minute 5: unread messages go by the first, policies by the second."""
    ledgers = [ledger(1, MINUTE, 5 * MINUTE), ledger(2, 6 * MINUTE, 0)]
    slowest = Position(1, 9) if subscribed else None
    found = fates(
        ledgers, slowest, total_size=20, limits=limits, now_ms=now_minutes * MINUTE, is_subscribed=subscribed, readable=LATEST
    )
    assert found[0] == expected
    assert len(found) == 1 + expected.goes


@pytest.mark.parametrize(("behind", "goes"), [(MEGABYTE - 1, False), (MEGABYTE, True)])
def test_a_policy_of_a_size_keeps_that_much(behind: int, goes: bool) -> None:
    """A ledger that is larger than the size does not go with all that the policy was to keep."""
    ledgers = [ledger(1, 1, 1, 5 * MEGABYTE), ledger(2, 2, 0, 0)]
    found = fates(ledgers, None, total_size=5 * MEGABYTE + behind, limits=Limits(-1, 1), now_ms=MINUTE)
    assert found[0] == Fate(goes, "size")


def test_a_ledger_of_an_older_version_counts_from_its_end() -> None:
    ledgers = [ledger(1, 0, 5 * MINUTE), ledger(2, 6 * MINUTE, 0)]
    found = fates(ledgers, None, total_size=20, limits=Limits(0, 0, 10), now_ms=15 * MINUTE)
    assert found == [Fate(False, "unread", 15 * MINUTE + 1)]


@pytest.mark.parametrize("slowest", [None, Position(2, 9), Position(3, 5)])
@pytest.mark.parametrize(("readable", "going"), [(EARLIEST, 0), (Position(1, 8), 0), (Position(1, 9), 1), (LATEST, 2)])
def test_what_open_transactions_may_have_written_stays(readable: Position, going: int, slowest: Position | None) -> None:
    """Also behind a subscription that was set to the end, past what is not decided."""
    ledgers = [ledger(1, 1, 1), ledger(2, 2, 2), ledger(3, 3, 0)]
    found = fates(ledgers, slowest, total_size=30, limits=Limits(), now_ms=MINUTE, readable=readable)
    assert sum(each.goes for each in found) == going


async def unread(world: Any, kit: Any, limits: Limits = WEEK) -> tuple[Any, Any]:
    """A log with two full ledgers and a third one, and no subscription."""
    log, listener = await world.open()
    log.limits = limits
    await kit.fill(log, listener, range(11))
    return log, listener


async def test_messages_without_a_subscription_stay_for_their_time(
    world: Any, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    log, listener = await unread(world, kit)
    await log.trim()
    assert log.total_entries == 11
    told = log.next_trim()
    assert (told.rule, told.messages, told.entries) == ("unread", 5, 5)
    assert told.at_ms == log.infos[0].last_append_ms + 7 * DAY * MINUTE + 1
    assert told.unread_bytes == log.infos[0].size + log.infos[1].size > 0
    world.clock.advance(told.at_ms - 1 - world.clock.now_ms())
    await log.trim()
    assert log.total_entries == 11
    assert "deleted" not in caplog.text
    world.clock.advance(1)
    await log.trim()
    assert log.total_entries == 1
    (line,) = [record for record in caplog.records if "deleted" in record.message]
    assert line.levelno == logging.INFO
    assert "deleted 10 messages of persistent://t/ns/topic " in line.message
    assert "older than 10080 minutes (retention.unread_minutes)" in line.message
    assert log.next_trim().rule == "newest"
    assert log.trimmed_index == 9
    await kit.fill(log, listener, range(11, 16))
    assert log.next_trim().messages == log.next_trim().entries == 2


async def test_the_time_is_that_of_the_last_message_not_of_the_load(world: Any, kit: Any) -> None:
    """A restart closes the ledger late; that does not make its messages younger."""
    log, listener = await unread(world, kit)
    await log.close()
    world.clock.advance(6 * DAY * MINUTE)
    log, listener = await world.open()
    log.limits = WEEK
    await kit.fill(log, listener, range(11, 12))
    world.clock.advance(DAY * MINUTE + 1)
    await log.trim()
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == [11]


async def test_the_last_subscription_takes_nothing_with_it(world: Any, kit: Any) -> None:
    log, _listener = await unread(world, kit)
    await log.open_cursor("s", initial="earliest")
    assert log.next_trim().rule == "needed"
    await log.delete_cursor("s")
    await log.trim()
    assert log.total_entries == 11


async def test_with_a_subscription_what_it_has_read_goes(world: Any, kit: Any) -> None:
    log, _listener = await unread(world, kit)
    cursor = await log.open_cursor("s", initial="earliest")
    cursor.acknowledge_cumulative(log.last_position)
    world.clock.advance(1)
    await log.trim()
    assert log.total_entries == 1
    assert log.next_trim().unread_minutes == 0


async def test_readers_and_the_brokers_own_cursors_are_no_subscriptions(world: Any, kit: Any) -> None:
    log, _listener = await unread(world, kit)
    log.non_durable_cursor("reader", EARLIEST)
    own = await log.open_cursor("pulsar.dedup", initial="latest")
    own.acknowledge_cumulative(log.last_position)
    world.clock.advance(DAY * MINUTE)
    await log.trim()
    assert log.total_entries == 11
    assert log.next_trim().rule == "unread"


async def test_an_administrator_may_delete_what_nobody_has_read(world: Any, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log, _listener = await unread(world, kit)
    world.clock.advance(1)
    await log.trim(keeps_unread=False)
    assert log.total_entries == 1
    assert "it was asked to be truncated" in caplog.text


async def test_an_open_transaction_holds_its_ledger(world: Any, kit: Any) -> None:
    log, _listener = await unread(world, kit, Limits(-1, -1))
    log.readable = lambda: Position(log.infos[1].ledger_id, 2)
    log.limits = Limits()
    world.clock.advance(1)
    await log.trim()
    assert [kit.number_of(entry) for entry in await kit.everything(log)] == list(range(5, 11))
    log.readable = lambda: LATEST
    await log.trim()
    assert log.total_entries == 1
