"""Faults that strike between two steps of a plan: the leader is held up there, is paused or dies, and something else happens
meanwhile.

The steps are those that the product names (`runtime/plans.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from braid.runtime.env import Random
from braid.runtime.plans import Moment, watching
from braid.testing.sim.loop import NODE, WORLD, on
from braid.testing.sim.txn_faults import Strikes
from braid.testing.sim.world import World

LAYOUT_STEPS: Final = tuple(
    (f"split:{point}", f"merge:{point}")
    for point in ("discover", "create-children", "seal-parent", "hand-over-producers", "flip", "late-cursors", "finish")
)
RESET_STEPS: Final = tuple(
    (f"seek:{point}", f"clear-backlog:{point}") for point in ("revoke", "reset", "reset", "finish", "give-back")
)
AGAIN_AT: Final = "late-cursors"
"""Whoever was held up may be so a second time here: a layout shows its new segments, and not everything is done."""
DEEDS: Final = ("hold", "hold", "hold", "pause", "kill")
LONGEST_SECONDS: Final = 1.5


async def hold_up(
    world: World, rng: Random, nemesis: Strikes, steps: Sequence[Sequence[str]], meanwhile: Callable[[], None] = lambda: None
) -> None:
    """The next leader that comes to one of these steps (of several names; one is drawn) comes no further for a while, or never.
    `meanwhile` is called at that moment."""
    wanted, deed = rng.choice(steps), rng.choice(DEEDS)
    seconds, more = rng.uniform(0.05, LONGEST_SECONDS), rng.choice((0.0, rng.uniform(0.05, LONGEST_SECONDS)))
    caught: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def ambush(name: str, moment: Moment) -> None:
        broker = next((each for each in world.brokers if each.node is NODE.get()), None)
        if moment != "before" or broker is None or not broker.is_up:
            return
        if caught.done():
            if deed == "hold" and name.endswith(AGAIN_AT) and caught.result() == broker.number and not ended.done():
                ended.set_result(None)
                await asyncio.sleep(more)
            return
        if name not in wanted:
            return
        nemesis.note("plan-step", name, deed, broker.number)
        caught.set_result(broker.number)
        with on(WORLD):
            meanwhile()
        if deed == "kill":
            world.kill(broker.number)
        elif deed == "pause":
            broker.node.is_paused = True
            with on(WORLD):  # what a paused node has planned waits too
                world.loop.call_later(seconds, world.resume_node, broker.node)
        else:
            await asyncio.sleep(seconds)
        await asyncio.sleep(0)  # a node that is dead or paused comes no further

    with watching(ambush):
        await asyncio.wait([caught], timeout=rng.uniform(2.0, 6.0))
        if deed == "hold" and caught.done():
            await asyncio.wait([ended], timeout=seconds + 1.0)
    if deed == "kill" and caught.done():
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        number = caught.result()
        if world.brokers[number].node.is_dead and not world.is_rebooting:
            await world.restart(number)
