"""Messages in chunks: each is one row of the range that holds its last chunk, however a segment is cut into ranges."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_fetches import LEDGER, TOPIC, Made, alone, batch, chunks, fetched

from braid.client.segment_reads import Fetched
from braid.errors import BraidError, DataLost, NotReady
from braid.wire import messages as pb
from braid.wire.entries import entry_metadata
from braid_spark import chunks as chunks_module
from braid_spark.chunks import ChunksMissing
from braid_spark.columns import Columns, default_schema
from braid_spark.decode import SegmentDecoder

EVERYTHING = Columns.of(default_schema())


class Segment:
    """A segment that can be read by ranges."""

    def __init__(self, entries: list[bytes], low: int = 0) -> None:
        self.entries = entries
        self.low = low
        self.looks: list[tuple[int, int]] = []
        self.at_once = 3
        """Entries in one answer."""
        self.lasts: list[int] = []
        last = -1
        for entry in entries:
            last += entry_metadata(entry).num_messages_in_batch
            self.lasts.append(last)
        self.end = last + 1

    def fetch(self, start: int, stop: int) -> Fetched:
        if start < self.low:
            raise DataLost(f"Index {start} is not kept; the first one that is is {self.low}.", self.low)
        number = next(at for at, last in enumerate(self.lasts) if last >= start)
        behind = number
        while (
            behind < len(self.entries)
            and behind - number < self.at_once
            and (behind == number or self.lasts[behind - 1] + 1 < stop)
        ):
            behind += 1
        first = self.lasts[number - 1] + 1 if number else 0
        answer = fetched(self.entries[number:behind], first, number)
        answer.covered_to = min(answer.covered_to, stop)
        return answer

    def look_back(self, start: int, stop: int) -> Fetched:
        self.looks.append((start, stop))
        return self.fetch(start, stop)

    def read(self, start: int, stop: int, **options: Any) -> list[dict[str, Any]]:
        usual: dict[str, Any] = {"topic": TOPIC, "segment": 0, "look_back": self.look_back}
        decoder = SegmentDecoder(EVERYTHING, start=start, stop=stop, **(usual | options))
        found = []
        while start < stop:
            answer = self.fetch(start, stop)
            for each in decoder.decode(answer):
                found += each.to_pylist(maps_as_pydicts="strict")
            start = answer.covered_to
        self.lost = decoder.lost
        return found


def interleaved() -> tuple[list[bytes], list[tuple[int, bytes]]]:
    """Two messages in chunks among others, and the rows of all."""
    one, two = os.urandom(500), os.urandom(301)
    first = chunks(Made(value=one, key="a", properties=(("p", "1"),)), 4, "one", codec=1)
    second = chunks(Made(value=two, key="b"), 3, "two")
    small = batch([Made(value=b"x"), Made(value=b"y"), Made(value=b"z")])
    entries = [first[0], small, second[0], first[1], second[1], first[2], alone(Made(value=b"w")), second[2], small, first[3]]
    rows = [(1, b"x"), (2, b"y"), (3, b"z"), (8, b"w"), (9, two), (10, b"x"), (11, b"y"), (12, b"z"), (13, one)]
    return entries, rows


def test_a_message_in_chunks_is_one_row_with_the_index_of_its_last() -> None:
    entries, wanted = interleaved()
    segment = Segment(entries)
    found = segment.read(0, segment.end)
    assert [(row["__index"], row["value"]) for row in found] == wanted
    assert found[-1]["__key"] == b"a"
    assert found[-1]["__properties"] == {"p": "1"}
    where = pb.MessageIdData.FromString(found[-1]["__message_id"])
    assert (where.ledgerId, where.entryId, where.batch_index) == (LEDGER, 9, -1)
    assert (where.first_chunk_message_id.ledgerId, where.first_chunk_message_id.entryId) == (LEDGER, 0)
    assert segment.looks == []


@given(st.lists(st.integers(1, 13), unique=True), st.integers(1, 10))
@settings(max_examples=60, deadline=None)
def test_rows_are_the_same_wherever_ranges_are_cut(cuts: list[int], at_once: int) -> None:
    entries, wanted = interleaved()
    segment = Segment(entries)
    segment.at_once = at_once
    found = []
    for start, stop in pairwise([0, *sorted(cuts), segment.end]):
        found += segment.read(start, stop)
    assert [(row["__index"], row["value"]) for row in found] == wanted


def test_what_is_not_kept_in_memory_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks_module, "_MAX_HELD", 100)
    entries, wanted = interleaved()
    segment = Segment(entries)
    found = segment.read(0, segment.end)
    assert [(row["__index"], row["value"]) for row in found] == wanted
    assert segment.looks


def far_apart(distance: int) -> tuple[Segment, bytes]:
    value = os.urandom(64)
    first, last = chunks(Made(value=value), 2, "far")
    between = [Made(value=b"")] * (distance - 1)
    middle = [batch(between[at : at + 1000]) for at in range(0, len(between), 1000)]
    return Segment([first, *middle, last]), value


def test_first_chunks_are_looked_for_ten_thousand_messages_back() -> None:
    segment, value = far_apart(10_000)
    assert [row["value"] for row in segment.read(segment.end - 1, segment.end)] == [value]
    assert min(start for start, _ in segment.looks) == 0
    segment, _ = far_apart(10_001)
    with pytest.raises(
        ChunksMissing, match=r"index 10001 of topic://\S+ was sent in 2 chunks.*10,000 messages.*failOnDataLoss=false"
    ):
        segment.read(segment.end - 1, segment.end)
    assert segment.read(segment.end - 1, segment.end, is_loss_fatal=False) == []
    assert segment.lost == 1


def test_first_chunks_that_retention_removed_are_a_named_loss() -> None:
    entries, wanted = interleaved()
    segment = Segment(entries, low=1)
    with pytest.raises(ChunksMissing, match=r"index 13 .*does not hold them any more"):
        segment.read(1, segment.end)
    found = segment.read(1, segment.end, is_loss_fatal=False)
    assert [(row["__index"], row["value"]) for row in found] == wanted[:-1]
    assert segment.lost == 1


@pytest.mark.parametrize("low", [1, 2, 4])
def test_what_is_kept_is_found_however_little_is_kept_before_it(low: int) -> None:
    """The look back goes beyond the first message that is kept; what is lost there is nothing to this message."""
    entries, _ = interleaved()
    segment = Segment(entries, low=low)  # the message "two" begins at index 4
    found = segment.read(9, 10)
    assert [row["__index"] for row in found] == [9]
    assert all(start >= low for start, _ in segment.looks[1:])


def test_a_broker_that_does_not_answer_is_no_loss() -> None:
    entries, _ = interleaved()
    segment = Segment(entries)

    def refuse(start: int, stop: int) -> Fetched:
        raise NotReady("The topic is being moved; try again.")

    with pytest.raises(NotReady):
        segment.read(9, 10, look_back=refuse, is_loss_fatal=False)


@pytest.mark.parametrize("case", ["no first", "gap", "again", "begun again", "sizes", "impossible"])
def test_chunks_that_never_were_a_message_are_left_out(case: str) -> None:
    value = os.urandom(90)
    parts = chunks(Made(value=value), 3, "u")
    rows = 0
    if case == "no first":
        parts = parts[1:]
    elif case == "gap":
        parts = [parts[0], parts[2]]
    elif case == "again":
        parts, rows = [parts[0], parts[1], parts[1], parts[2]], 1
    elif case == "begun again":
        parts, rows = [parts[0], parts[1], *parts], 1
    elif case == "sizes":
        parts = [parts[0], chunks(Made(value=value + b"x"), 3, "u")[1], parts[2]]
    else:
        parts = [_renumbered(parts[0], 7)]
    entries = [*parts, alone(Made(value=b"next"))]
    segment = Segment(entries)
    found = [row["value"] for row in segment.read(0, segment.end)]
    assert found == [value] * rows + [b"next"]


def _renumbered(entry: bytes, chunk_id: int) -> bytes:
    metadata = entry_metadata(entry)
    metadata.chunk_id = chunk_id
    raw = metadata.SerializeToString()
    return len(raw).to_bytes(4, "big") + raw


def test_loss_is_an_error_of_braid() -> None:
    assert issubclass(ChunksMissing, BraidError)
