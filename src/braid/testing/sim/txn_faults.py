"""Faults that strike between two steps of a transaction: of a write, of an acknowledgment, of what becomes of them.

The steps are those that the product names (`runtime/plans.py`); what strikes is one of the world's verbs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from braid.errors import BraidError, Closed
from braid.runtime.env import Random
from braid.runtime.plans import Moment, watching
from braid.testing.sim.loop import NODE, WORLD, Node, on
from braid.testing.sim.txn_notes import open_transactions
from braid.testing.sim.world import SESSION_SECONDS, Broker, World

WRITE_STEPS = (("txn-write:op", "before"), ("txn-write:header", "before"), ("txn-write:append", "before"))
ACK_STEPS = (("txn-ack:op", "before"), ("txn-ack:header", "before"), ("txn-ack:owner", "before"))
LAST_STEPS = (
    ("txn-write:append", "after"),
    ("txn-materialise:aborted", "before"),
    ("txn-materialise:delete-ops", "before"),
    ("txn-ack:flush", "before"),
    ("txn-ack:delete-ops", "before"),
    ("txn-ack:delete-ops", "after"),
)
LATE_STEPS = (WRITE_STEPS[0], ACK_STEPS[0])
"""Of somebody who does not know yet that another one owns the log."""
DEEDS = ("kill", "pause", "abort", "abort", "freeze", "replace", "replace")
HOLD_SECONDS = 0.2
"""How long a step waits while what is open is aborted, and at most while another broker takes over."""


class Strikes(Protocol):
    """Whose faults these are: the nemesis."""

    def note(self, name: str, *details: Any) -> None: ...

    def replace(self, first: Broker) -> None: ...


async def strike(
    world: World,
    rng: Random,
    nemesis: Strikes,
    clients: Callable[[], list[Node]],
    late_steps: Sequence[tuple[str, str]] = LATE_STEPS,
) -> None:
    """The next broker that comes to a certain step dies there, or is paused, or an operator aborts what is open meanwhile, or
    another broker takes its place. Or it is paused together with some clients, who find out as late as it does that it has lost
    everything."""
    deed = rng.choice(DEEDS)
    if deed in ("freeze", "replace"):
        wanted = rng.choice(late_steps)
    else:
        wanted = rng.choice((*WRITE_STEPS, *ACK_STEPS, *(LAST_STEPS if deed != "abort" else ())))
    late = SESSION_SECONDS * rng.uniform(1.0, 1.6)
    seconds = rng.choice((rng.uniform(0.05, 2.0), late))
    caught: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def ambush(name: str, moment: Moment) -> None:
        broker = next((each for each in world.brokers if each.node is NODE.get()), None)
        if caught.done() or (name, moment) != wanted or broker is None or not broker.is_up:
            return
        nemesis.note("txn-step", *wanted, deed, broker.number)
        caught.set_result(broker.number)
        if deed == "kill":
            world.kill(broker.number)
        elif deed == "pause":
            _pause(world, broker.node, seconds)
        elif deed == "freeze":
            _pause(world, broker.node, late)
            for node in clients():
                if rng.random() < 0.5 and not node.is_dead:
                    _pause(world, node, late + rng.uniform(-0.5, 1.0))
        elif deed == "replace":
            nemesis.replace(broker)
            await asyncio.sleep(rng.uniform(0.0, HOLD_SECONDS))
        else:
            coordinator = broker.service.transactions.coordinator
            for txn in open_transactions(world.engine.tables.rows):
                world.spawn(broker.node, attempt(coordinator.end(txn, commit=False)), "abort")
            await asyncio.sleep(HOLD_SECONDS)
        await asyncio.sleep(0)  # a node that is dead or paused comes no further

    with watching(ambush):
        await asyncio.wait([caught], timeout=rng.uniform(2.0, 6.0))
    if deed == "kill" and caught.done():
        await asyncio.sleep(rng.uniform(0.0, 3.0))
        number = caught.result()
        if world.brokers[number].node.is_dead and not world.is_rebooting:
            await world.restart(number)


def _pause(world: World, node: Node, seconds: float) -> None:
    node.is_paused = True
    with on(WORLD):  # what a paused node has planned waits too
        world.loop.call_later(seconds, world.resume_node, node)


async def attempt(work: Coroutine[Any, Any, Any]) -> None:
    """An administrator's request; it may be refused."""
    try:
        await work
    except (BraidError, Closed):
        return
