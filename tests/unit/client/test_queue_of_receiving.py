"""`ReceiveQueue`: order, shares, waiting without loss."""

from __future__ import annotations

import asyncio

import pytest

from braid.client.receive_queue import ReceiveQueue
from braid.errors import Closed
from braid.testing.clock import ManualClock


def test_items_come_out_in_order_of_arrival() -> None:
    queue: ReceiveQueue[str, int] = ReceiveQueue(ManualClock(), 10)
    queue.put("a", [1, 2])
    queue.put("b", [3])
    queue.put("a", [4])
    assert (len(queue), queue.count("a"), queue.count("b")) == (4, 3, 1)
    assert [queue.take() for _ in range(5)] == [("a", 1), ("a", 2), ("b", 3), ("a", 4), None]
    assert queue.count("a") == 0


def test_dropping_a_lane_leaves_the_others() -> None:
    queue: ReceiveQueue[str, int] = ReceiveQueue(ManualClock(), 10)
    queue.put("a", [1, 2])
    queue.put("b", [3])
    assert queue.drop("a") == 2
    assert queue.drop("a") == 0
    assert queue.take() == ("b", 3)


@pytest.mark.inv("INV17")
@pytest.mark.parametrize(("lanes", "share"), [(0, 100), (1, 100), (2, 50), (7, 14), (100, 1), (1000, 1)])
def test_lanes_share_the_room(lanes: int, share: int) -> None:
    assert ReceiveQueue(ManualClock(), 100).share(lanes) == share


async def test_a_waiter_that_gives_up_loses_nothing() -> None:
    queue: ReceiveQueue[str, int] = ReceiveQueue(ManualClock(), 10)
    waiting = asyncio.ensure_future(queue.wait(lambda: len(queue) > 0, None))
    await asyncio.sleep(0)
    queue.put("a", [1])
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert queue.take() == ("a", 1)


async def test_waiting_ends_with_the_time_and_with_the_condition() -> None:
    clock = ManualClock()
    queue: ReceiveQueue[str, int] = ReceiveQueue(clock, 10)
    late = asyncio.ensure_future(queue.wait(lambda: len(queue) > 1, 5.0))
    early = asyncio.ensure_future(queue.wait(lambda: len(queue) > 0, 5.0))
    await asyncio.sleep(0)
    queue.put("a", [1])
    assert await early is True
    await clock.advance(4.9)
    assert not late.done()
    await clock.advance(0.1)
    assert await late is False


async def test_a_condition_may_raise_why_nothing_comes() -> None:
    queue: ReceiveQueue[str, int] = ReceiveQueue(ManualClock(), 10)

    def ended() -> bool:
        raise Closed("ended")

    with pytest.raises(Closed):
        await queue.wait(ended, None)
