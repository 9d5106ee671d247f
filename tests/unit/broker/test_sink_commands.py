"""Sinks on the wire: BEGIN_SINK and GET_SINK, their refusals, roles, and who may not send them."""

from __future__ import annotations

from typing import Any

import pytest

from braid.errors import Forbidden, NotAllowed, ProducerFenced, from_code
from braid.model.txn import TxnId
from braid.testing.raw_client import RawClient
from braid.txn.config import TransactionConfig
from braid.wire import messages as pb
from braid.wire import sink_requests, txn_requests
from braid.wire.commands import encode
from braid.wire.types import CommandType

SINK = "8a2c/topic://public/default/out"


async def ask(client: RawClient, frame: bytes) -> Any:
    """The answer to request 9, an error in it raised."""
    client.send(frame)
    reply = await client.answer(9)
    if reply.HasField("error"):
        raise from_code(reply.error, reply.message)
    return reply


def txn(reply: Any) -> TxnId:
    return TxnId(reply.txnid_most_bits, reply.txnid_least_bits)


async def test_begin_and_get(broker: Any) -> None:
    client = await broker.client(is_braid=True)
    reply = await ask(client, sink_requests.get(9, SINK))
    assert not reply.HasField("last_batch") and not reply.HasField("current_batch")
    begun = await ask(client, sink_requests.begin(9, SINK, 0, "a", 30_000))
    assert not begun.is_duplicate
    header = await broker.service.transactions.store.header(txn(begun), fresh=True)
    assert header.value.timeout_ms == header.value.created_ms + 30_000
    reply = await ask(client, sink_requests.get(9, SINK))
    assert not reply.HasField("last_batch")
    assert (reply.current_batch, reply.current_run, txn(reply)) == (0, "a", txn(begun))
    await ask(client, txn_requests.decide(9, txn(begun), []))
    reply = await ask(client, sink_requests.get(9, SINK))
    assert (reply.last_batch, reply.last_run) == (0, "a")
    assert not reply.HasField("current_batch") and not reply.HasField("txnid_least_bits")
    again = await ask(client, sink_requests.begin(9, SINK, 0, "a", 30_000))
    assert again.is_duplicate and txn(again) == (0, 0)


async def test_a_fenced_run(broker: Any) -> None:
    client = await broker.client(is_braid=True)
    await ask(client, sink_requests.begin(9, SINK, 0, "a", 30_000))
    await ask(client, sink_requests.begin(9, SINK, 0, "b", 30_000))
    with pytest.raises(ProducerFenced, match="run a has lost the sink"):
        await ask(client, sink_requests.begin(9, SINK, 0, "a", 30_000))


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (sink_requests.begin(9, "", 0, "a", 1000), "cannot name a sink"),
        (sink_requests.begin(9, "x" * 4097, 0, "a", 1000), "cannot name a sink"),
        (sink_requests.begin(9, SINK, 0, "", 1000), "cannot name a run"),
        (sink_requests.begin(9, SINK, 1 << 63, "a", 1000), "numbered from 0"),
        (sink_requests.begin(9, SINK, 0, "a", 0), r"transactions\.max_timeout_seconds"),
        (encode(CommandType.BEGIN_SINK, pb.CommandBeginSink(request_id=9, sink=SINK, run="a")), "names no batch"),
        (sink_requests.get(9, ""), "names no sink"),
    ],
)
async def test_what_cannot_be_begun_or_asked_for(broker: Any, frame: bytes, text: str) -> None:
    client = await broker.client(is_braid=True)
    with pytest.raises(NotAllowed, match=text):
        await ask(client, frame)
    assert await broker.service.transactions.store.sinks(10) == []
    assert await broker.service.transactions.store.open_headers(10) == []


async def test_a_sink_of_another_role(broker: Any) -> None:
    for name in ("alice", "bob"):
        client = await broker.client(is_braid=True)
        (link,) = [each.link for each in broker.server.connections if each.link.principal is None]
        link.principal = name
        if name == "alice":
            await ask(client, sink_requests.begin(9, SINK, 0, "a", 1000))
        else:
            with pytest.raises(Forbidden, match="another role's"):
                await ask(client, sink_requests.begin(9, SINK, 0, "b", 1000))
        reply = await ask(client, sink_requests.get(9, SINK))
        assert reply.HasField("current_batch") == (name == "alice")


async def test_switched_off(world: Any) -> None:
    broker = await world.broker(transactions=TransactionConfig(enabled=False))
    client = await broker.client(is_braid=True)
    for frame in (sink_requests.begin(9, SINK, 0, "a", 1000), sink_requests.get(9, SINK)):
        with pytest.raises(NotAllowed, match=r"transactions\.enabled"):
            await ask(client, frame)


async def test_other_clients_have_no_sinks(broker: Any, client: RawClient) -> None:
    client.send(sink_requests.begin(9, SINK, 0, "a", 1000))
    await client.expect_close()
    assert await broker.service.transactions.store.sinks(10) == []
