"""Random operations by three brokers that die, stand still and are replaced, over owners that fail: all of it heals."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest
from tests.unit.scalable.fakes import TOPIC, Broker, BrokerDied, World, simulate

from braid.errors import BraidError, LedElsewhere, NotReady
from braid.model.segments import physical_name
from braid.runtime.plans import Moment, watching
from braid.scalable.records import subscriptions_path
from braid.scalable.service import ScalableTopicService
from braid.testing.sim.loop import NODE, WORLD, on

OPERATIONS = 40
KINDS = {
    "split": 30,
    "merge": 30,
    "prune": 6,
    "create-subscription": 12,
    "delete-subscription": 4,
    "seek": 10,
    "queue": 4,
}


class Trouble:
    """Now and then ends or stops a broker in the middle of a plan."""

    def __init__(self, world: World, rng: Random) -> None:
        self.world = world
        self.rng = rng
        self.count: Counter[str] = Counter()
        self.is_on = True

    async def step(self, _name: str, _moment: Moment) -> None:
        node = NODE.get()
        broker = next((each for each in self.world.brokers if each.node is node and not node.is_dead), None)
        if broker is None or not self.is_on or self.rng.random() > 0.04:
            return
        if self.rng.random() < 0.5:
            self.count["kills"] += 1
            await broker.crash_here()
        self.count["pauses"] += 1
        broker.pause()
        with on(WORLD):
            asyncio.get_running_loop().call_later(self.rng.uniform(1, 25), broker.resume)
        await asyncio.sleep(0)

    def fail(self, _operation: str, _segment: str) -> Exception | None:
        return NotReady("Try again.") if self.is_on and self.rng.random() < 0.02 else None


async def _operate(service: ScalableTopicService, rng: Random) -> str:
    controller = await service.lead_scalable(TOPIC)
    order = controller.layout.active_in_order
    subscription = f"s{rng.randrange(3)}"
    kind = rng.choices(list(KINDS), list(KINDS.values()))[0]
    match kind:
        case "split":
            await controller.split_segment(rng.choice(order).segment_id)
        case "merge" if len(order) > 1:
            at = rng.randrange(len(order) - 1)
            await controller.merge_segments(order[at].segment_id, order[at + 1].segment_id)
        case "prune":
            await controller.prune()
        case "create-subscription":
            await controller.create_subscription(subscription)
        case "delete-subscription":
            await controller.delete_subscription(subscription)
        case "seek":
            await controller.seek(subscription, 0)
        case _:
            kind = "queue"
            await service.register_queue_subscription(TOPIC, f"q{rng.randrange(3)}", "latest")
    return kind


async def _live(world: World, rng: Random) -> Counter[str]:
    trouble = Trouble(world, rng)
    for _ in range(3):
        await world.broker()
    await world.brokers[0].do(lambda service: service.create_topic(TOPIC, 2))
    world.segments.fail = trouble.fail
    with watching(trouble.step):
        asked: Broker | None = None
        for _ in range(OPERATIONS):
            alive = [each for each in world.brokers if not each.node.is_dead]
            while len(alive) < 3:
                alive.append(await world.broker())
            world.owners[TOPIC] = 1 + world.brokers.index(rng.choice(alive))
            broker = asked if asked in alive and asked is not None else rng.choice(alive)
            asked = None
            try:
                async with asyncio.timeout(60):
                    trouble.count[await broker.do(lambda service: _operate(service, rng))] += 1
            except LedElsewhere as error:
                asked = next((each for each in world.brokers if each.id == error.broker_id), None)
                await asyncio.sleep(rng.uniform(0, 3))
            except (BraidError, BrokerDied, TimeoutError):
                trouble.count["failed"] += 1
                await asyncio.sleep(rng.uniform(0, 5))
        trouble.is_on = False
    await asyncio.sleep(60)
    await world.until_settled()
    return trouble.count


async def _check(world: World) -> None:
    layout = await world.layout()
    layout.check()
    topics = {str(physical_name(TOPIC, each)): each for each in layout.all_segments.values()}
    assert set(world.segments.topics) == set(topics), "topics and segments of the DAG are not the same"
    records = await world.records(subscriptions_path(TOPIC))
    assert not any(b'"pending"' in record.value for record in records)
    streams = {record.name for record in records if record.name.startswith("s")}
    for name, segment in topics.items():
        topic = world.segments.topics[name]
        assert topic.is_sealed == segment.is_sealed
        assert streams <= set(topic.cursors)
        assert {each for each in topic.cursors if each.startswith("s")} <= streams, "a deleted subscription left a cursor"


@pytest.mark.inv("INV4", "INV6", "INV7")
@pytest.mark.req("R468-12")
def test_random_trouble_heals() -> None:
    total: Counter[str] = Counter()

    async def main(world: World, rng: Random) -> Counter[str]:
        count = await _live(world, rng)
        await _check(world)
        return count

    for seed in range(16):
        total += simulate(lambda world, seed=seed: main(world, Random(seed)), seed=seed)  # type: ignore[misc]
    print(f"random trouble: {dict(total)}")
    assert min(total["split"], total["merge"], total["kills"], total["pauses"]) > 20
