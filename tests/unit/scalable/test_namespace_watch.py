"""Namespace watches: snapshots, differences, hashes, filters, and that nothing of them stays."""

import asyncio
from collections.abc import Mapping

import msgspec
import pytest
from tests.unit.scalable.coordination import World, virtually

from braid.errors import BraidError, StoreUnavailable
from braid.model.layout import SegmentLayout
from braid.model.names import NamespaceName, TopicName
from braid.scalable.namespace_watch import NamespaceDiff, NamespaceSnapshot, NamespaceWatches, NamespaceWatchSession
from braid.scalable.records import PendingOperation, ScalableTopicMetadata, subscription_path, topic_path
from braid.wire.checksum import topics_hash

NAMESPACE = NamespaceName("public", "default")
Heard = list[NamespaceSnapshot | NamespaceDiff | BraidError]


def named(name: str) -> TopicName:
    return TopicName.parse(f"topic://public/default/{name}")


async def put(world: World, name: str, *, is_deleting: bool = False, **properties: str) -> None:
    metadata = ScalableTopicMetadata(
        epoch=0,
        next_segment_id=0,
        segments={},
        properties=properties,
        pending_operation=PendingOperation(kind="delete", operation_id="x") if is_deleting else None,
    )
    value = msgspec.json.encode(metadata.with_layout(SegmentLayout.initial(1, 0)))
    await world.store.put(topic_path(named(name)), value)


async def watch(
    watches: NamespaceWatches, filters: Mapping[str, str] | None = None, current_hash: str | None = None
) -> tuple[NamespaceWatchSession, Heard]:
    heard: Heard = []
    return await watches.open(1, NAMESPACE, heard.append, filters=filters, current_hash=current_hash), heard


def names(*short: str) -> tuple[str, ...]:
    return tuple(str(named(each)) for each in short)


def test_a_snapshot_then_differences_of_the_topics_with_all_properties() -> None:
    async def main(world: World) -> None:
        await put(world, "b", team="x", kind="log")
        await put(world, "a", team="x")
        await put(world, "c/d e", team="y")
        await put(world, "gone", is_deleting=True)
        await world.store.put(subscription_path(named("a"), "sub"), b"{}")
        watches = NamespaceWatches(world.runtime, world.engine.handle("broker"), world.config)
        _, everything = await watch(watches)
        _, of_x = await watch(watches, {"team": "x"})
        _, of_both = await watch(watches, {"team": "x", "kind": "log"})
        assert everything == [NamespaceSnapshot(names("a", "b", "c/d e"))]
        assert of_x == [NamespaceSnapshot(names("a", "b"))]
        assert of_both == [NamespaceSnapshot(names("b"))]
        await put(world, "e", team="x")
        await world.store.delete(topic_path(named("a")))
        await put(world, "b", team="z", kind="log")
        await asyncio.sleep(0.2)
        assert everything[1:] == [NamespaceDiff(names("e"), names("a"))]  # one message for the burst
        assert of_x[1:] == [NamespaceDiff(names("e"), names("a", "b"))]
        assert of_both[1:] == [NamespaceDiff((), names("b"))]
        await asyncio.sleep(30)
        assert len(everything) == len(of_x) == 2
        await watches.close()

    virtually(main)


def test_who_knows_the_set_already_hears_nothing_until_it_changes() -> None:
    async def main(world: World) -> None:
        await put(world, "a")
        await put(world, "b")
        watches = NamespaceWatches(world.runtime, world.engine.handle("broker"), world.config)
        _, heard = await watch(watches, current_hash=topics_hash(names("b", "a")))
        _, other = await watch(watches, current_hash="00000000")
        assert heard == []
        assert other == [NamespaceSnapshot(names("a", "b"))]
        await put(world, "c")
        await asyncio.sleep(0.2)
        assert heard == [NamespaceDiff(names("c"), ())]
        await watches.close()

    virtually(main)


@pytest.mark.inv("INV15")
def test_a_change_that_no_watch_tells_is_found_by_the_reconcile() -> None:
    async def main(world: World) -> None:
        store = world.engine.handle("broker")
        watches = NamespaceWatches(world.runtime, store, world.config)
        _, heard = await watch(watches)
        original = store.watch

        def deaf(*_arguments: object, **_options: object) -> object:
            raise StoreUnavailable("no watches today")

        store.watch = deaf  # type: ignore[method-assign, assignment]
        world.engine.watches.end(StoreUnavailable("no more events"))
        await asyncio.sleep(0.1)
        await put(world, "a")
        await asyncio.sleep(6)
        assert heard == [NamespaceSnapshot(()), NamespaceDiff(names("a"), ())]
        store.watch = original  # type: ignore[method-assign]
        await watches.close()

    virtually(main)


@pytest.mark.inv("INV17")
def test_after_many_watches_nothing_is_left() -> None:
    async def main(world: World) -> None:
        await put(world, "a")
        watches = NamespaceWatches(world.runtime, world.engine.handle("broker"), world.config)
        baseline, tasks = len(world.engine.watches), len(asyncio.all_tasks())
        sessions = [(await watch(watches))[0] for _ in range(300)]
        await asyncio.sleep(1)
        assert watches.session_count == 300
        assert len(world.engine.watches) == baseline + 1
        for session in sessions:
            session.close()
            session.close()
        await asyncio.sleep(1)
        assert len(world.engine.watches) == baseline
        assert len(asyncio.all_tasks()) == tasks
        assert watches.feeds == {}

    virtually(main)


@pytest.mark.inv("INV15")
def test_a_watch_that_cannot_be_told_ends_and_the_others_go_on() -> None:
    async def main(world: World) -> None:
        def push(news: object) -> None:
            if not isinstance(news, NamespaceSnapshot):
                raise ValueError("cannot be encoded")

        await put(world, "a")
        watches = NamespaceWatches(world.runtime, world.engine.handle("broker"), world.config)
        await watches.open(2, NAMESPACE, push)
        _, heard = await watch(watches)
        for name in ("b", "c"):
            await put(world, name)
            await asyncio.sleep(1)
        assert heard[1:] == [NamespaceDiff(names("b"), ()), NamespaceDiff(names("c"), ())]
        assert watches.session_count == 1

    virtually(main)


def test_a_record_that_cannot_be_read_does_not_say_that_the_topic_is_gone() -> None:
    async def main(world: World) -> None:
        await put(world, "a")
        watches = NamespaceWatches(world.runtime, world.engine.handle("broker"), world.config)
        _, heard = await watch(watches)
        await world.store.put(topic_path(named("a")), b"{")
        await world.store.put(topic_path(named("never")), b"{")
        await asyncio.sleep(3 * world.config.reconcile_seconds)
        assert heard == [NamespaceSnapshot(names("a"))]

    virtually(main)
