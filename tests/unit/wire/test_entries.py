"""Entries that are not as they should be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import EntryCorrupt, ProtocolError
from braid.wire.checksum import crc32c
from braid.wire.encode import broker_entry_metadata
from braid.wire.entries import admit, build_entry, entry_metadata, message_count, payload_offset, split_entry, verify
from braid.wire.messages import BrokerEntryMetadata, MessageMetadata

METADATA = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1)
RAW = METADATA.SerializeToString()
BARE = len(RAW).to_bytes(4, "big") + RAW + b"payload"


def test_without_checksum() -> None:
    assert verify(BARE)
    assert entry_metadata(BARE) == METADATA
    assert message_count(BARE) == 1
    assert BARE[payload_offset(BARE) :] == b"payload"


def test_every_flipped_bit_behind_the_magic_is_noticed() -> None:
    entry = build_entry(METADATA, b"payload")
    for bit in range(16, len(entry) * 8):
        broken = bytearray(entry)
        broken[bit // 8] ^= 1 << bit % 8
        assert not verify(bytes(broken))


@pytest.mark.parametrize("length", range(6))
def test_a_cut_checksum_does_not_hold(length: int) -> None:
    assert verify(build_entry(METADATA, b"")[:length]) is (length < 2)


def test_count_is_that_of_the_metadata() -> None:
    METADATA_OF_BATCH = MessageMetadata(producer_name="p", sequence_id=0, publish_time=1, num_messages_in_batch=12)
    assert message_count(build_entry(METADATA_OF_BATCH, b"")) == 12


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (b"", "cannot hold"),
        (b"\x00\x00", "cannot hold"),
        (b"\x0e\x01\x00\x00\x00\x00", "cannot hold"),
        (b"\x0e\x01\x00\x00\x00\x00\x00\x00\x00", "cannot hold"),
        (b"\x00\x00\x00\x09abc", "cannot hold the 9 bytes"),
        (b"\xff\xff\xff\xffabc", "cannot hold"),
        (b"\x00\x00\x00\x02\xff\xff", "not valid protobuf"),
        (b"\x00\x00\x00\x00", "lacks a required field"),
        (b"\x00\x00\x00\x05\x0a\x01p\x10\x00", "lacks a required field"),
        ((len(RAW) + 2).to_bytes(4, "big") + RAW + b"\x58\x00", "counts 0 messages"),
        ((len(RAW) + 11).to_bytes(4, "big") + RAW + b"\x58" + b"\xff" * 9 + b"\x01", "counts -1 messages"),
    ],
)
def test_unreadable_metadata(entry: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        message_count(entry)


def test_incomplete_metadata_is_not_sent() -> None:
    with pytest.raises(ValueError, match="incomplete"):
        build_entry(MessageMetadata(), b"")


def stored(**fields: int) -> bytes:
    raw = BrokerEntryMetadata(**fields).SerializeToString()
    return b"\x0e\x02" + len(raw).to_bytes(4, "big") + raw + BARE


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (b"", "does not begin"),
        (BARE, "does not begin"),
        (build_entry(METADATA, b"payload"), "does not begin"),
        (b"\x0e\x02\x00\x00\x00\xff" + BARE, "not readable"),
        (b"\x0e\x02\x00\x00\x00\x02\xff\xff" + BARE, "not readable"),
        (stored(), "lacks its append time or its index"),
        (stored(broker_timestamp=1_700_000_000_000), "lacks its append time or its index"),
        (stored(index=1), "lacks its append time or its index"),
        (broker_entry_metadata(1_700_000_000_000, 300, None)[:-1], "not readable"),
        (broker_entry_metadata(1_700_000_000_000, 300, None)[:-2], "not readable"),
    ],
)
def test_stored_entries_that_are_not_ours(entry: bytes, reason: str) -> None:
    with pytest.raises(EntryCorrupt, match=reason):
        split_entry(entry)


def test_a_time_that_only_looks_usual() -> None:
    raw = bytes.fromhex("0801 1085858505 1007")
    assert split_entry(b"\x0e\x02\x00\x00\x00\x09" + raw) == (1, 7, None, 15)


def test_an_index_that_is_cut_off() -> None:
    head = bytes.fromhex("0880d095ffbc3110")
    for index in (b"", b"\x80", b"\x80" * 7, b"\x80" * 8, b"\x80" * 10):
        with pytest.raises(EntryCorrupt, match="not readable"):
            split_entry(b"\x0e\x02" + (len(head) + len(index)).to_bytes(4, "big") + head + index)


def test_half_a_transaction_is_none() -> None:
    assert split_entry(stored(broker_timestamp=1, index=2, txn_most_bits=3))[2] is None


def _apart(entry: bytes) -> int | str:
    """What `admit` must say, by its two halves."""
    if not verify(entry):
        return 0
    try:
        return message_count(entry)
    except ProtocolError as error:
        return str(error)


def _at_once(entry: bytes) -> int | str:
    try:
        return admit(entry)
    except ProtocolError as error:
        return str(error)


@given(
    st.sampled_from([build_entry(METADATA, b"payload"), BARE, build_entry(METADATA, b"")]),
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 255)), max_size=3),
    st.integers(0, 60),
)
def test_admitting_is_verifying_and_counting(entry: bytes, changes: list[tuple[int, int]], length: int) -> None:
    changed = bytearray(entry)
    for place, value in changes:
        if place < len(changed):
            changed[place] = value
    assert _at_once(bytes(changed[:length])) == _apart(bytes(changed[:length]))
    resealed = bytes(changed[10:])
    body = (len(resealed) // 2).to_bytes(4, "big") + resealed
    sealed = b"\x0e\x01" + crc32c(body).to_bytes(4, "big") + body
    assert _at_once(sealed) == _apart(sealed)
