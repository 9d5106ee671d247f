"""What an owner looks at before and after it makes, moves or shows something of a segment, each check by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from tests.unit.broker.test_segments import EPOCH, TOPIC, create, layout, made, names, put, record_of, with_handle

from braid.broker.topic import Topic
from braid.broker.topic_records import INCARNATION
from braid.errors import LedgerFenced, NotReady, TopicNotFound
from braid.metadata.claims import StaleLeader
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.scalable.records import SubscriptionChange, SubscriptionMetadata, subscription_path
from braid.testing.raw_client import RawClient
from braid.wire.types import SubType

__all__ = ["layout"]


async def exists(broker: Any, segment: TopicName) -> bool:
    return bool(await broker.service.logs.exists(segment.managed_ledger_name, fresh=True))


@pytest.mark.inv("INV8")
async def test_a_sealed_segment_whose_data_is_gone_is_not_made_again(world: Any, broker: Any, layout: SegmentLayout) -> None:
    """It would be an active log in the place of a sealed one: never read to its end, so that its children wait for ever."""
    await put(world, record_of(layout.split(0, 5)))
    segment = names(layout)[0]
    with pytest.raises(TopicNotFound, match="sealed"):
        await create(broker, segment, subscriptions={"sub": "earliest"})
    assert not await exists(broker, segment)
    assert str(segment) not in broker.service.topics


@pytest.mark.inv("INV4", "INV5")
@pytest.mark.parametrize(
    ("meanwhile", "stays"),
    [
        pytest.param({"gone": True}, False, id="the topic is deleted"),
        pytest.param({"incarnation": "incarnation-2", "leader_epoch": EPOCH + 1}, False, id="another topic has the name"),
        pytest.param({"leader_epoch": EPOCH + 1}, True, id="a successor leads the same topic"),
    ],
)
async def test_what_a_late_creation_made_is_in_nobodys_way(
    world: Any, broker: Any, layout: SegmentLayout, monkeypatch: pytest.MonkeyPatch, meanwhile: dict[str, Any], stays: bool
) -> None:
    """The leader that asked is deposed between the owner's check and the log: what was made goes, unless it is another's."""
    segment, logs = names(layout)[0], broker.service.logs
    honest = logs.create

    async def held_up(name: str, properties: Any = None) -> bool:
        found: bool = await honest(name, properties)
        await made(broker)._topic(segment, properties[INCARNATION])  # loaded as what it was made for
        await put(world, None if "gone" in meanwhile else record_of(layout, **meanwhile))
        return found

    monkeypatch.setattr(logs, "create", held_up)
    with pytest.raises(TopicNotFound if "gone" in meanwhile else StaleLeader):
        await create(broker, segment)
    assert await exists(broker, segment) is stays


@pytest.mark.inv("INV5", "INV15")
@pytest.mark.parametrize("what", ["create", "terminate"])
async def test_a_stale_copy_of_an_earlier_topic_deposes_no_leader_of_the_later_one(
    world: Any, broker: Any, layout: SegmentLayout, what: str
) -> None:
    """What is loaded is not what the leader means. That is the copy's fault, and not the leader's, if another owner has the
    log by now: the copy is dropped, and the call made again."""
    segment, service = names(layout)[0], broker.service
    await create(broker, segment)
    stale = await service.topic(segment, create=False)
    await service.logs.delete(segment.managed_ledger_name)
    await put(world, record_of(layout, incarnation="incarnation-2"))
    assert not stale.log.is_fenced, "nothing has told it"
    await service.logs.create(segment.managed_ledger_name, {INCARNATION: "incarnation-2"})
    given: dict[str, Any] = {"subscriptions": {}, "producers": {}} if what == "create" else {"force": True}
    call = partial(getattr(made(broker), what), segment, epoch=EPOCH, incarnation="incarnation-2", **given)
    with pytest.raises(LedgerFenced):
        await call()
    await call()
    assert (await service.topic(segment, create=False)).log.properties[INCARNATION] == "incarnation-2"


@pytest.mark.inv("INV7")
@pytest.mark.parametrize("end", ["deleted", "being deleted"])
async def test_a_cursor_made_while_its_subscription_was_being_deleted_goes_again(
    world: Any, broker: Any, layout: SegmentLayout, client: RawClient, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Whoever deletes has looked at this segment already and comes no more: the cursor would keep its data for ever."""
    segment, key = names(layout)[0], subscription_path(TOPIC, "s")
    await create(broker, segment)
    await with_handle(world, key, SubscriptionMetadata(type="QUEUE"))
    doomed = SubscriptionMetadata(type="QUEUE", pending=SubscriptionChange(kind="delete", operation_id="d"))
    topic = broker.topic(str(segment))
    honest = Topic.subscription

    async def overtaken(asked: Topic, *given: Any, **named: Any) -> Any:
        found = await honest(asked, *given, **named)
        await with_handle(world, key, None if end == "deleted" else doomed)
        return found

    monkeypatch.setattr(Topic, "subscription", overtaken)
    with pytest.raises(NotReady, match="being deleted"):
        await client.subscribe(str(segment), "s", SubType.SHARED)
    assert topic.log.cursors == topic.subscriptions == {}
