"""A leader that was paused past its session and goes on as if nothing had happened: everything it does is refused.

Three brokers on real sockets. The leader of a scalable topic is paused (also in the middle of a split, at each of its steps), a
survivor takes over and splits; the resumed leader's create, terminate, delete and layout CAS find its successor's claim.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from tests.e2e.churn_cluster import Cluster, patiently

from braid.broker.service import BrokerService
from braid.metadata.claims import StaleLeader
from braid.metadata.election import Leadership
from braid.model.names import TopicName
from braid.runtime.plans import Moment, watching
from braid.scalable.config import ScalableConfig
from braid.scalable.plans import TopicWork
from braid.testing.sim import dag_checkers
from braid.web.node import BrokerNode

TOPIC = "topic://public/default/led"
NAME = TopicName.parse(TOPIC)
SESSION_SECONDS = 1.0
BOUND = 15.0


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    fast = ScalableConfig(reconcile_seconds=0.3, adopt_seconds=0.3, drain_poll_seconds=0.2)
    async with Cluster(session_seconds=SESSION_SECONDS, scalable=fast) as cluster:
        await cluster.nodes[0].service.create_scalable_topic(NAME, 2)
        yield cluster


async def leader_of(cluster: Cluster) -> BrokerNode:
    await patiently("finding a leader", BOUND, lambda: lead_somewhere(cluster, cluster.up))
    leader = cluster.leader(TOPIC)
    assert leader is not None
    return leader


async def lead_somewhere(cluster: Cluster, nodes: list[BrokerNode]) -> BrokerNode:
    """Any of these brokers that leads, or comes to lead, the topic."""
    for node in nodes:
        if cluster.controller(node, TOPIC) is not None:
            await node.service.scalable.lead(NAME)
            return node
    service: BrokerService = nodes[0].service
    await service.scalable.lead(NAME)
    return nodes[0]


async def survivor_of(cluster: Cluster, old: BrokerNode) -> BrokerNode:
    """A broker that leads instead."""
    others = [node for node in cluster.nodes if node is not old]
    found: BrokerNode = await patiently("a take-over", BOUND, lambda: lead_somewhere(cluster, others))
    return found


def work_of(cluster: Cluster, node: BrokerNode) -> TopicWork:
    controller = cluster.controller(node, TOPIC)
    assert controller is not None and controller._term is not None
    return controller._term.work


async def refused(what: str, attempt: Callable[[], Coroutine[Any, Any, Any]]) -> None:
    """Until the answer is that another one leads; a broker that was away joins the others again first."""

    async def once() -> None:
        try:
            await attempt()
        except StaleLeader:
            return
        raise AssertionError(f"{what} was not refused")

    await patiently(what, BOUND, once)


def check_history(cluster: Cluster) -> None:
    events = cluster.history.events
    assert [*dag_checkers.dag(events), *dag_checkers.intent_first(events), *dag_checkers.leader_terms(events)] == []


@pytest.mark.inv("INV4")
async def test_everything_a_resumed_leader_does_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    old = await leader_of(cluster)
    work = work_of(cluster, old)
    cluster.pause(old)
    survivor = await survivor_of(cluster, old)
    assert survivor is not old
    controller = cluster.controller(survivor, TOPIC)
    assert controller is not None
    layout = await controller.split_segment(0)
    after = cluster.record(TOPIC)
    assert after is not None and after.epoch == 1 and after.leader_epoch > work.leadership.epoch
    cluster.resume(old)

    # It may believe in its leadership as firmly as it likes, say because its clock stood still.
    monkeypatch.setattr(Leadership, "holds", lambda _leadership: True)
    child, sealed = layout.segment(2), layout.segment(0)
    attempts: dict[str, Callable[[], Coroutine[Any, Any, Any]]] = {
        "create": lambda: work.create(child, ["late"]),
        "terminate": lambda: work.terminate(child),
        "delete": lambda: work.delete(sealed),
        "layout": lambda: work.change(lambda value: value.with_layout(value.layout.split(1, 0))),
        "claim": work.claim,
    }
    for what, attempt in attempts.items():
        await refused(what, attempt)
        assert cluster.record(TOPIC) == after, what
    monkeypatch.undo()

    for segment in (child, sealed):
        assert "late" not in await survivor.service.segments.subscriptions(work.name(segment))
    assert not (await survivor.service.segments.stats(work.name(child))).consumers
    await controller.split_segment(1)
    assert await cluster.quiet(BOUND) == {}
    check_history(cluster)
    assert cluster.controller(old, TOPIC) is None


@pytest.mark.inv("INV4", "INV6")
@pytest.mark.parametrize(
    ("point", "moment"),
    [
        ("split:discover", "before"),
        ("split:create-children", "before"),
        ("split:seal-parent", "before"),
        ("split:hand-over-producers", "before"),
        ("split:flip", "before"),
        ("split:late-cursors", "before"),
        ("split:finish", "before"),
    ],
)
async def test_a_leader_that_wakes_in_the_middle_of_a_split(cluster: Cluster, point: str, moment: Moment) -> None:
    """Its successor finished that split and began another one; what the old leader goes on with is refused."""
    old = await leader_of(cluster)
    asleep, awake = asyncio.Event(), asyncio.Event()
    mine = asyncio.current_task()

    async def sleep(name: str, when: Moment) -> None:
        if (name, when) == (point, moment) and not asleep.is_set() and mine is not asyncio.current_task():
            cluster.pause(old)
            asleep.set()
            await awake.wait()

    controller = cluster.controller(old, TOPIC)
    assert controller is not None
    with watching(sleep):
        async with asyncio.timeout(BOUND):
            attempt = asyncio.create_task(controller.split_segment(1))
            await asleep.wait()
        survivor = await survivor_of(cluster, old)
        successor = cluster.controller(survivor, TOPIC)
        assert successor is not None and successor is not controller
        await patiently("finishing the split", BOUND, lambda: successor.split_segment(0))
        record = cluster.record(TOPIC)
        assert record is not None and record.epoch == 2 and record.pending_operation is None
        cluster.resume(old)
        awake.set()
        await asyncio.wait([attempt], timeout=BOUND)
    assert attempt.done() and attempt.exception() is not None
    assert cluster.record(TOPIC) == record
    assert await cluster.quiet(BOUND) == {}
    check_history(cluster)
