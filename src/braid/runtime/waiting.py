"""Waiting with patience for an event that others wait for as well.

Must not set the event: a timer that did so would tell everybody that something happened, and whoever waits in a loop would spin
on an event that stays set.
"""

from __future__ import annotations

import asyncio

from braid.runtime.clock import Clock


async def wait_at_most(clock: Clock, event: asyncio.Event, seconds: float) -> bool:
    """Until the event is set or `seconds` are over; whether it is set. Gives way to others in any case."""
    waiting = asyncio.get_running_loop().create_task(event.wait())
    timer = clock.call_later(max(0.0, seconds), waiting.cancel)
    try:
        await asyncio.wait([waiting])
    finally:
        timer.cancel()
        waiting.cancel()
    return event.is_set()
