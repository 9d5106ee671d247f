"""Who may attach to a segment as a stream consumer: only whom the leader's records give it to, also if it is taken away just
then, and only who knows of every reset (INV8)."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from braid.errors import NotReady
from braid.model.layout import SegmentLayout
from braid.model.names import TopicName
from braid.model.positions import EARLIEST
from braid.model.segments import physical_name
from braid.scalable.records import (
    RegistrationRecord,
    ScalableTopicMetadata,
    SubscriptionChange,
    SubscriptionMetadata,
    consumer_path,
    subscription_path,
    topic_path,
)
from braid.testing.raw_client import RawClient
from braid.wire.types import SubType

pytestmark = pytest.mark.inv("INV8")
TOPIC = TopicName.parse("topic://public/default/orders")
LEADER = {"epoch": 7, "incarnation": "life"}
RECORD = SubscriptionMetadata(type="STREAM", created_ms=5)
MARK = RECORD.mark("life")


class Segment:
    """Segment 0 of a topic with the stream subscription `s`, whose records the tests write as a leader would."""

    def __init__(self, broker: Any, client: RawClient) -> None:
        self.service = broker.service
        self.client = client
        layout = SegmentLayout.initial(2, 1)
        self.record = ScalableTopicMetadata(
            epoch=0, next_segment_id=0, segments={}, incarnation="life", leader_epoch=7
        ).with_layout(layout)
        self.name = physical_name(TOPIC, layout.all_segments[0])
        self.attached = 0

    async def write(self, key: str, value: Any) -> None:
        await self.service.metadata.put(key, msgspec.json.encode(value))

    async def subscription(self, **fields: Any) -> None:
        await self.write(subscription_path(TOPIC, "s"), msgspec.structs.replace(RECORD, **fields))

    async def assign(self, *numbers: int, mark: str = MARK) -> None:
        await self.write(consumer_path(TOPIC, "s", "a-seg-b"), RegistrationRecord(segments=numbers, mark=mark))

    async def attach(self, consumer: str = "a-seg-b-seg-0", **fields: Any) -> None:
        self.attached += 1
        kind = fields.pop("sub_type", SubType.EXCLUSIVE)
        await self.client.subscribe(str(self.name), "s", kind, self.attached, consumer_name=consumer, **fields)

    async def readers(self) -> tuple[str, ...]:
        return tuple((await self.service.segments.backlog(self.name, "s")).consumers)


@pytest.fixture
async def segment(broker: Any, client: RawClient) -> Segment:
    made = Segment(broker, client)
    await made.write(topic_path(TOPIC), made.record)
    await made.subscription()
    await made.service.local_segments.create(made.name, subscriptions={"s": "earliest"}, producers={}, **LEADER)
    return made


async def test_only_whom_the_records_give_it_to(segment: Segment) -> None:
    with pytest.raises(NotReady, match="not assigned to a-seg-b in s at the moment"):
        await segment.attach()
    for assigned in ((), (1,)):
        await segment.assign(*assigned)
        with pytest.raises(NotReady, match="not assigned"):
            await segment.attach()
    await segment.assign(0, mark="life:4")  # of an earlier subscription of the name
    with pytest.raises(NotReady, match="not assigned"):
        await segment.attach()
    assert await segment.readers() == ()
    await segment.assign(0, 1)
    await segment.attach()
    assert await segment.readers() == ("a-seg-b-seg-0",)


@pytest.mark.parametrize("name", ["", "admin", "a-seg-1", "a-seg-00", "a-seg-"])
async def test_other_names_are_not_looked_at(segment: Segment, name: str) -> None:
    await segment.attach(name)
    assert await segment.readers() == (name,)


async def test_queue_consumers_are_assigned_nothing(segment: Segment) -> None:
    await segment.subscription(type="QUEUE")
    await segment.attach(sub_type=SubType.SHARED)
    assert await segment.readers() == ("a-seg-b-seg-0",)


@pytest.mark.parametrize("kind", ["seek", "clear-backlog"])
async def test_nobody_attaches_during_a_reset_nor_before_it_knows_of_it(segment: Segment, kind: Any) -> None:
    await segment.assign(0)
    await segment.subscription(pending=SubscriptionChange(kind=kind, operation_id="x"))
    with pytest.raises(NotReady, match="was reset"):
        await segment.attach()
    await segment.subscription(resets=2)
    with pytest.raises(NotReady, match="was reset"):
        await segment.attach(resets=1)
    assert await segment.readers() == ()
    await segment.attach(resets=2)
    await segment.client.close_consumer(segment.attached)
    await segment.attach()  # a client that does not count


async def test_an_attachment_is_undone_if_the_segment_is_taken_away_just_then(segment: Segment, monkeypatch: Any) -> None:
    await segment.assign(0)
    found = (await segment.service.topic(segment.name, create=False)).subscriptions["s"]
    real, seen = found.attach, []

    async def attach(*given: Any) -> Any:
        consumer = await real(*given)
        await segment.assign()  # the leader writes, and looks who is attached
        seen.append(await segment.readers())
        return consumer

    monkeypatch.setattr(found, "attach", attach)
    with pytest.raises(NotReady, match="not assigned"):
        await segment.attach()
    assert seen == [("a-seg-b-seg-0",)]
    assert await segment.readers() == ()
    monkeypatch.undo()
    await segment.assign(0)
    await segment.attach()


async def test_who_is_closed_by_a_reset_while_it_is_looked_at_is_not_let_in(segment: Segment, monkeypatch: Any) -> None:
    await segment.assign(0)
    found = (await segment.service.topic(segment.name, create=False)).subscriptions["s"]
    records = segment.service.records
    real = records.registration

    async def registration(*given: Any) -> Any:
        answer = await real(*given)
        if found.consumers:
            await found.seek(EARLIEST)
        return answer

    monkeypatch.setattr(records, "registration", registration)
    with pytest.raises(NotReady, match="closed while it was being created"):
        await segment.attach()
    assert await segment.readers() == ()
    monkeypatch.undo()
    await segment.attach()
