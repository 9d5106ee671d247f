"""One connection that asks for much at once: others have their turn in between, and its requests keep their order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from tests.steps import Steps

from braid.broker.commands import SYNC_COMMANDS
from braid.testing.raw_client import RawClient
from braid.wire import requests
from braid.wire.types import CommandType, InitialPosition, SubType

TOPIC = "persistent://public/default/turns"
SCALABLE = "topic://public/default/turns"


async def asked(client: RawClient, count: int) -> Steps:
    with Steps("broker") as steps:
        client.send(b"".join(requests.partitioned_metadata(client.next_request(), TOPIC) for _number in range(count)))
        for _number in range(count):
            await client.expect(CommandType.PARTITIONED_METADATA_RESPONSE)
    return steps


async def test_many_requests_at_once_are_begun_in_several_turns(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client(answers_pings=True)
    few, many = await asked(client, 150), await asked(client, 1500)
    assert many.total > 5 * few.total
    assert many.longest < 2 * few.longest


async def test_many_small_acknowledgments_at_once_are_applied_in_several_turns(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client(answers_pings=True)
    await client.producer(TOPIC)
    positions = [await client.store(b"x", number) for number in range(1200)]
    await client.subscribe(TOPIC, initial=InitialPosition.EARLIEST, permits=2000, sub_type=SubType.SHARED)
    await client.messages(1200)
    costs = []
    for part in (positions[1:200:2], positions[201::2]):
        with Steps("broker") as steps:
            client.ack(*part[:-1])
            for position in part:
                client.ack(position)
            await client.acked(part[-1])
        costs.append(steps.longest)
    cursor = broker.topic(TOPIC).subscriptions["sub"].cursor
    assert [each for each in positions if cursor.is_acknowledged(each)] == positions[1::2]
    # The command with many ids is one piece; those with one each are not.
    assert costs[1] < 6 * costs[0]


async def test_what_comes_behind_many_requests_does_not_overtake_them(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client(answers_pings=True)
    frames = [requests.partitioned_metadata(client.next_request(), TOPIC) for _number in range(300)]
    frames += [requests.scalable_topic_lookup(number, SCALABLE) for number in range(100)]
    frames += [requests.scalable_topic_close(number) for number in range(100)]
    frames += [requests.partitioned_metadata(number := client.next_request(), TOPIC)]
    client.send(b"".join(frames))
    while (await client.expect(CommandType.PARTITIONED_METADATA_RESPONSE)).request_id != number:
        pass
    (connection,) = broker.server.connections
    for _turn in range(2000):
        if not connection.creating and not connection.watches and not broker.service.dag_watches.feeds:
            break
        await asyncio.sleep(0)
    assert not connection.watches
    assert broker.service.dag_watches.session_count == 0


async def test_messages_behind_many_requests_are_stored_in_order(world: Any) -> None:
    broker = await world.broker()
    client = await broker.client(answers_pings=True)
    await client.producer(TOPIC)
    frames: list[bytes] = []
    send, client.send = client.send, lambda *made: frames.extend(made)
    for number in range(5):
        frames += [requests.partitioned_metadata(client.next_request(), TOPIC) for _number in range(100)]
        client.publish(b"%d" % number, number)
    client.send = send
    client.send(b"".join(frames))
    stored = [(await client.receipt()).sequence_id for _number in range(5)]
    assert stored == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["lost while it waits", "broken behind them"])
async def test_a_connection_that_ends_meanwhile_is_not_served(world: Any, kind: str) -> None:
    broker = await world.broker()
    client = await broker.client(answers_pings=True)
    many = b"".join(requests.partitioned_metadata(client.next_request(), TOPIC) for _number in range(500))
    if kind == "lost while it waits":
        client.send(many)
        client.close()
    else:
        client.send(many + b"\x00\x00\x00\x06\xff\xff\xff\xff\xff\xff")
    for _turn in range(500):
        if not broker.server.connections:
            break
        await asyncio.sleep(0)
    assert not broker.server.connections
    other = await broker.client(answers_pings=True)
    await asked(other, 1)


@pytest.mark.parametrize("before", [0, 200])
async def test_a_bug_in_what_waits_ends_the_connection_as_one_in_what_is_served_at_once(
    world: Any, until: Any, monkeypatch: pytest.MonkeyPatch, before: int
) -> None:
    """Else nothing would be read from it any more, and nobody would ever notice: its client waits for its answers."""
    broker = await world.broker()
    client = await broker.client(answers_pings=True)

    def fail(_connection: Any, _body: Any) -> None:
        raise RuntimeError("A bug.")

    monkeypatch.setitem(SYNC_COMMANDS, CommandType.FLOW, fail)
    asyncio.get_running_loop().set_exception_handler(lambda _loop, _context: None)
    frames = [requests.partitioned_metadata(client.next_request(), TOPIC) for _number in range(before)]
    client.send(b"".join([*frames, requests.flow(1, 1)]))
    await until(lambda: not broker.server.connections)


async def test_the_end_of_a_connection_with_many_watches_lets_others_have_their_turn(world: Any) -> None:
    broker = await world.broker()
    longest = []
    for count in (100, 800):
        client = await broker.client(answers_pings=True)
        for number in range(count):
            client.send(requests.scalable_topic_lookup(number, f"{TOPIC}-{count}-{number}"))
        for _number in range(count):
            await client.expect(CommandType.SCALABLE_TOPIC_UPDATE)
        assert broker.service.dag_watches.session_count == count
        with Steps("broker") as steps:
            client.close()
            for _turn in range(3000):
                if not broker.service.dag_watches.feeds:
                    break
                await asyncio.sleep(0)
        assert broker.service.dag_watches.session_count == 0
        longest.append(steps.longest)
    assert longest[1] < 2 * longest[0]
