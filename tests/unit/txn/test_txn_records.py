"""What transactions leave in the store: names, shapes, index entries."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import StoreMismatch
from braid.model.positions import Position
from braid.model.txn import TxnId
from braid.txn import records
from braid.txn.records import AbortedTxn, SerialBlock, TxnHeader, TxnOp

ROOT = TxnId.of(3, 5)


@pytest.mark.req("R473-7")
def test_header_has_one_path_and_the_fields_of_the_design() -> None:
    header = TxnHeader(state="OPEN", timeout_ms=1_700_000_060_000, created_ms=1_700_000_000_000)
    assert records.header_key(ROOT) == "/txn/3_5242880"
    assert json.loads(records.encode(header)) == {
        "state": "OPEN",
        "timeout_ms": 1_700_000_060_000,
        "created_ms": 1_700_000_000_000,
    }
    final = TxnHeader(
        state="COMMITTED", timeout_ms=3, created_ms=1, finalized_ms=2, owner="ann", is_decider=True, winners=(1, 4)
    )
    assert json.loads(records.encode(final)) == {
        "state": "COMMITTED",
        "timeout_ms": 3,
        "created_ms": 1,
        "finalized_ms": 2,
        "owner": "ann",
        "decider": True,
        "winners": [1, 4],
    }
    assert records.decode_header("/txn/x", records.encode(final)) == final


@pytest.mark.req("R473-10")
def test_op_has_kind_segment_subscription_and_position() -> None:
    op = TxnOp(kind="ack", segment="segment://t/n/x/a", subscription="s", position="7:9", incarnation="a1")
    assert json.loads(records.encode(op)) == {
        "kind": "ack",
        "segment": "segment://t/n/x/a",
        "subscription": "s",
        "position": "7:9",
        "incarnation": "a1",
    }
    for each in (
        op,
        TxnOp(kind="write", segment="persistent://t/n/x", position="1:-1", entries=17),
        TxnOp(kind="ack", segment="s", subscription="s", position="1:2", is_cumulative=True, ack_set="f0", batch_size=8),
    ):
        assert records.decode_op("/txn-op/x", records.encode(each)) == each


def test_ops_of_a_root_are_one_collection_and_name_their_sub_transaction() -> None:
    assert records.ops_of(ROOT) == "/txn-op/3_5242880"
    assert records.op_prefix(ROOT) == "/txn-op/3_5242880/0"
    assert records.op_prefix(ROOT.with_sub(12)) == "/txn-op/3_5242880/12"
    assert records.op_txn(records.op_prefix(ROOT.with_sub(12)) + "-00000000000000000003") == ROOT.with_sub(12)


def test_other_paths() -> None:
    assert records.subs_of(ROOT) == "/txn-sub/3_5242880"
    assert records.serial_key(3) == "/txn-serial/3"
    assert records.leader_path(3) == "/txn-tc/leader/3"
    assert records.aborted_key("persistent://t/n/x", ROOT.with_sub(1)) == "/txn-aborted/persistent%3A%2F%2Ft%2Fn%2Fx/3_5242881"


@given(st.text(min_size=1), st.text(min_size=1), st.text(min_size=1), st.text(min_size=1))
def test_acks_of_two_subscriptions_never_share_a_key(segment: str, first: str, other_segment: str, second: str) -> None:
    one, two = records.acks_secondary(segment, first), records.acks_secondary(other_segment, second)
    assert (one == two) == ((segment, first) == (other_segment, second))
    assert one.count(":") == 1
    assert "/" not in one


@pytest.mark.req("R473-15", "R473-16")
def test_index_entries_sort_by_number() -> None:
    small = TxnHeader(state="OPEN", timeout_ms=999, created_ms=1)
    large = TxnHeader(state="OPEN", timeout_ms=1000, created_ms=1)
    name = records.TXN_BY_DEADLINE
    assert records.header_index(small)[name] < records.header_index(large)[name]
    final = TxnHeader(state="ABORTED", timeout_ms=999, created_ms=1, finalized_ms=12)
    assert records.header_index(final) == {records.TXN_BY_FINAL_STATE: "ABORTED:00000000000000000012"}


def test_outcome_of_sub_transactions() -> None:
    committed = TxnHeader(state="COMMITTED", timeout_ms=1, created_ms=0, is_decider=True, winners=(2,))
    assert [committed.outcome(sub) for sub in range(4)] == ["COMMITTED", "ABORTED", "COMMITTED", "ABORTED"]
    aborted = TxnHeader(state="ABORTED", timeout_ms=1, created_ms=0, is_decider=True)
    assert {aborted.outcome(sub) for sub in range(4)} == {"ABORTED"}
    opened = TxnHeader(state="OPEN", timeout_ms=1, created_ms=0, is_decider=True)
    assert {opened.outcome(sub) for sub in range(4)} == {"OPEN"}


@pytest.mark.parametrize("position", [Position(3, 7), Position(-1, -1), Position(9, -1), Position(2**62, 2**40)])
def test_positions_come_back(position: Position) -> None:
    assert records.text_position(records.position_text(position)) == position


def test_small_records_come_back() -> None:
    aborted = AbortedTxn(last="3:7", incarnation="a1")
    assert records.decode_aborted("/k", records.encode(aborted)) == aborted
    assert records.decode_serials("/k", records.encode(SerialBlock(next=20_001))) == SerialBlock(next=20_001)


@pytest.mark.parametrize("value", [b"", b"nonsense", b"{}", b'{"state":"MAYBE","timeout_ms":1,"created_ms":1}', b"[]", b"\xff"])
def test_record_that_cannot_be_read_is_named(value: bytes) -> None:
    with pytest.raises(StoreMismatch, match="/txn/3_1"):
        records.decode_header("/txn/3_1", value)


def test_fields_of_a_later_version_are_passed_over() -> None:
    value = b'{"state":"OPEN","timeout_ms":1,"created_ms":1,"formatVersion":2,"colour":"red"}'
    assert records.decode_header("/k", value).is_open
