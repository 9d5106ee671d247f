"""`IndividualAcks`: what is sent is what was acknowledged, in whatever order, over lost connections and new attachments."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import braid
from braid.broker.commands import SYNC_COMMANDS
from braid.client.individual_acks import MAX_OPEN, IndividualAcks
from braid.client.messages import MessageId
from braid.model.ackset import full
from braid.testing.broker import InProcessBroker
from braid.wire.types import CommandType

SIZES = (0, 1, 3, 70)
"""Of the batches, by entry id; 0 = not a batch."""


class OneByOne:
    """The same without runs: a mask per entry, changed at each message."""

    def __init__(self) -> None:
        self.unsent: dict[tuple[int, int], int] = {}
        self.open: dict[tuple[int, int], int] = {}

    def add(self, message_id: MessageId) -> None:
        position = message_id.ledger_id, message_id.entry_id
        mask = 0
        if message_id.batch_index >= 0:
            mask = self.open.get(position, full(message_id.batch_size)) & ~(1 << message_id.batch_index)
            self.open[position] = mask
            if not mask:
                del self.open[position]
        self.unsent[position] = self.unsent.get(position, -1) & mask


def add(acks: IndividualAcks, message_id: MessageId) -> None:
    if not acks.extends_run(message_id):
        acks.add(message_id)


ids = st.builds(
    lambda ledger_id, entry_id, index: MessageId(
        ledger_id, entry_id, -1, min(index, SIZES[entry_id] - 1), batch_size=SIZES[entry_id], segment_id=2
    ),
    st.integers(1, 2),
    st.integers(0, len(SIZES) - 1),
    st.integers(0, 69),
)
runs = st.builds(
    lambda first, count: (
        [
            MessageId(first.ledger_id, first.entry_id, -1, index, first.batch_size, 2)
            for index in range(first.batch_index, min(first.batch_index + count, max(first.batch_size, 0)))
        ]
        or [first]
    ),
    ids,
    st.integers(1, 70),
)


@given(st.lists(runs | st.sampled_from(["take", "fail", "attach", "forget"]), max_size=20))
def test_runs_of_neighbours_make_the_same_masks(steps: list[list[MessageId] | str]) -> None:
    acks, model = IndividualAcks(), OneByOne()
    for step in steps:
        if isinstance(step, list):
            for each in step:
                add(acks, each)
                model.add(each)
        elif step == "attach":
            acks.forget_batches()
            model.open.clear()
        elif step == "forget":
            acks.clear()
            model.unsent.clear()
        else:
            assert bool(acks) is bool(model.unsent)
            taken = acks.take()
            assert taken == model.unsent
            if step == "fail":
                acks.put_back(taken)
            else:
                model.unsent = {}
    assert acks.take() == model.unsent
    assert not acks


def test_entries_of_chunks_are_acknowledged_whole() -> None:
    acks = IndividualAcks()
    acks.add_entries([(1, 2), (1, 3)])
    assert acks.take() == {(1, 2): 0, (1, 3): 0}


@pytest.mark.inv("INV17")
def test_batches_whose_rest_goes_to_others_are_not_kept_for_ever() -> None:
    acks = IndividualAcks()
    for entry_id in range(MAX_OPEN + 100):
        add(acks, MessageId(1, entry_id, -1, 0, batch_size=2, segment_id=2))
        assert acks.take() == {(1, entry_id): 0b10}
    assert len(acks._open) == MAX_OPEN
    add(acks, MessageId(1, 0, -1, 1, batch_size=2, segment_id=2))  # forgotten: the broker knows that the other one is done
    add(acks, MessageId(1, MAX_OPEN, -1, 1, batch_size=2, segment_id=2))
    assert acks.take() == {(1, 0): 0b01, (1, MAX_OPEN): 0}


@pytest.mark.parametrize("way", ["plain", "waited for", "in a transaction"])
async def test_no_command_names_more_than_a_thousand_entries(monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """However many are acknowledged in one turn: a broker deals with a command in one piece."""
    sizes: list[int] = []
    apply = SYNC_COMMANDS[CommandType.ACK]

    def noted(connection: Any, body: Any) -> None:
        sizes.append(len(body.message_id))
        apply(connection, body)

    monkeypatch.setitem(SYNC_COMMANDS, CommandType.ACK, noted)
    async with InProcessBroker() as broker, braid.connect(broker.service_url) as client:
        consumer = await client.consumer("many", "s", initial="earliest")
        producer = await client.producer("many", batching=False)
        await asyncio.gather(*(producer.send(b"x") for _number in range(2500)))
        messages = [await consumer.receive(timeout=30) for _number in range(2500)]
        if way == "in a transaction":
            async with client.transaction() as txn:
                await asyncio.gather(*(consumer.acknowledge(each, txn=txn, wait=True) for each in messages))
        else:
            waits = way == "waited for"
            await asyncio.gather(*(consumer.acknowledge(each, wait=waits) for each in messages))
            await consumer.acknowledge(messages[0], wait=True)
    assert sizes[:3] == [1000, 1000, 500]
