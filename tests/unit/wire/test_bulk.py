"""Answers with a payload: their frames, cut anywhere, damaged, or with lists that do not fit."""

from __future__ import annotations

import pytest

from braid.errors import DataLost, IncarnationMismatch, NotReady, ProtocolError, from_code, wire_text
from braid.wire import bulk, messages
from braid.wire.client import Bulk, ClientProtocol, Delivery
from braid.wire.commands import Command, encode
from braid.wire.frames import LargeRooms
from braid.wire.replies import PONG
from braid.wire.types import CommandType

BODIES: list[bytes | memoryview] = [b"first", memoryview(b"--second")[2:], b"", b"x" * 5000]


def frame() -> bytes:
    return b"".join(bulk.fetched(7, 12, [3, 4, 5, 11], [9, 9, 9, 10], [0, 1, 2, 0], [100, 100, 101, 102], BODIES))


def test_an_answer_is_the_same_however_it_is_cut() -> None:
    data = PONG + frame() + PONG
    for size in (1, 7, 64, 4000, len(data)):
        protocol = ClientProtocol()
        events = [event for at in range(0, len(data), size) for event in protocol.receive(data[at : at + size])]
        kinds = [type(event) for event in events]
        assert kinds == [Command, Bulk, Command]
        answer = events[1]
        assert isinstance(answer, Bulk)
        assert answer.data is not None
        assert bytes(answer.data) == b"firstsecond" + b"x" * 5000
        assert (answer.type, answer.body.request_id, answer.body.covered_to) == (CommandType.FETCH_ENTRIES_RESPONSE, 7, 12)
        assert list(answer.body.size) == [5, 6, 0, 5000]
        assert list(answer.body.last_index) == [3, 4, 5, 11]
        bulk.check_fetched(answer.body, answer.data)


@pytest.mark.parametrize("size", [100, 1 << 15, 1 << 20])
def test_large_entries_are_received_in_place(size: int) -> None:
    """In pieces of any size: neighbours come out whole, and what a fetch brought stays as it is when more comes."""
    bodies: list[bytes | memoryview] = [bytes([number]) * size for number in range(4)]
    pieces = bulk.fetched(7, 12, [0, 1, 2, 3], [9] * 4, [0, 1, 2, 3], [100] * 4, bodies)
    assert len(pieces) == (2 if size == 100 else 5), "small ones are copied together, large ones go as they are"
    answer = b"".join(pieces)
    data = PONG + answer + PONG + answer + PONG
    for step in (len(data), 65_536, 60_001, 4099):
        protocol, events, at = ClientProtocol(), [], 0
        while at < len(data):
            room = protocol.room()
            part = data[at : at + min(step, len(room))]
            room[: len(part)] = part
            events += protocol.received(len(part))
            at += len(part)
        assert [type(event) for event in events] == [Command, Bulk, Command, Bulk, Command]
        for each in events[1::2]:
            assert isinstance(each, Bulk)
            assert each.data is not None
            assert bytes(each.data) == b"".join(bodies)
            assert each.data.readonly


def test_rooms_of_large_frames_are_used_again_once_nobody_looks_at_them() -> None:
    rooms = LargeRooms()
    held = [rooms.take(1 << 20) for _ in range(5)]
    for number, each in enumerate(held):
        each[:] = bytes([number]) * len(each)
    assert len({id(each.obj) for each in held}) == 5, "what somebody looks at is nobody else's"
    assert [bytes(each[:1]) for each in held] == [bytes([number]) for number in range(5)]
    part = held[1][10:20].toreadonly()
    kept = id(held[0].obj)
    held[:] = held[1:2]
    del each
    again = [rooms.take(size) for size in (1 << 20, 1000, 1 << 20)]
    assert kept in {id(one.obj) for one in again}
    assert all(one.obj is not part.obj for one in again), "a view of a part is a look, too"
    assert bytes(part) == b"\x01" * 10
    assert [len(one) for one in again] == [1 << 20, 1000, 1 << 20]
    again.clear()
    assert len(rooms.take(3 << 20)) == 3 << 20, "one that is too small makes way"
    assert rooms.kept <= 3


def test_a_large_message_is_received_in_place() -> None:
    entry = b"\x00\x00\x00\x02ok" + b"v" * (1 << 20)
    body = messages.CommandMessage(consumer_id=1, message_id=messages.MessageIdData(ledgerId=3, entryId=4))
    head = encode(CommandType.MESSAGE, body)
    data = (len(head) - 4 + len(entry)).to_bytes(4, "big") + head[4:] + entry
    protocol, events, at = ClientProtocol(), [], 0
    while at < len(data):
        room = protocol.room()
        part = data[at : at + len(room)]
        room[: len(part)] = part
        events += protocol.received(len(part))
        at += len(part)
    (delivery,) = events
    assert isinstance(delivery, Delivery)
    assert type(delivery.entry) is bytes
    assert delivery.entry == entry


def test_an_answer_without_entries_is_one_too() -> None:
    (answer,) = ClientProtocol().receive(b"".join(bulk.fetched(7, 12, [], [], [], [], [])))
    assert isinstance(answer, Bulk)
    assert answer.data is not None
    assert (bytes(answer.data), answer.body.covered_to) == (b"", 12)
    bulk.check_fetched(answer.body, b"")


def test_a_refusal_has_no_payload() -> None:
    body = messages.CommandFetchEntriesResponse(request_id=7, message="no")
    (answer,) = ClientProtocol().receive(encode(CommandType.FETCH_ENTRIES_RESPONSE, body))
    assert isinstance(answer, Command)


def test_damage_is_noticed() -> None:
    whole = frame()
    for at in (len(whole) - 1, len(whole) - 5000, len(whole) - 5011):
        damaged = bytearray(whole)
        damaged[at] ^= 1
        (answer,) = ClientProtocol().receive(bytes(damaged))
        assert isinstance(answer, Bulk)
        assert answer.data is None
    magic = bytearray(whole)
    magic[whole.index(b"\x0e\x01", len(whole) - 5030)] = 0
    (broken,) = ClientProtocol().receive(bytes(magic))
    assert isinstance(broken, ProtocolError)


def test_lists_must_fit_the_payload() -> None:
    (answer,) = ClientProtocol().receive(frame())
    assert isinstance(answer, Bulk)
    body = answer.body
    with pytest.raises(ProtocolError, match="do not fit"):
        bulk.check_fetched(body, b"shorter")
    body.ledger_id.append(1)
    with pytest.raises(ProtocolError, match="do not fit"):
        bulk.check_fetched(body, answer.data or b"")


def test_errors_without_a_number_survive_the_wire() -> None:
    for error in (DataLost("Gone.", 42), DataLost("Gone.", 0), IncarnationMismatch("Another one.")):
        told = from_code(error.code, wire_text(error))
        assert (type(told), told.message, vars(told)) == (type(error), error.message, vars(error))
    assert wire_text(NotReady("Later.")) == "Later."
    assert type(from_code(6, "[Later] not ours")) is NotReady
    assert type(from_code(6, "[DataLost low=x] not ours")) is NotReady
