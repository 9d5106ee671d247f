"""Transaction ids: their bits, their text, their root."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import InvalidArgument
from braid.model.txn import MAX_SERIAL, MAX_SUB, TxnId

words = st.integers(0, 2**64 - 1)


def test_the_bits_of_an_id() -> None:
    txn = TxnId.of(3, 5, 7)
    assert txn == TxnId(3, 5 * 2**20 + 7)
    assert (txn.most, txn.serial, txn.sub) == (3, 5, 7)
    assert txn.root == TxnId.of(3, 5)
    assert txn.root.root == txn.root
    assert txn.root.with_sub(7) == txn
    assert txn.with_sub(8) == TxnId.of(3, 5, 8)
    assert str(txn) == "3_5242887"


def test_the_highest_id_is_positive_where_longs_are_signed() -> None:
    assert TxnId.of(0, MAX_SERIAL, MAX_SUB).least == 2**63 - 1


@given(words, words)
def test_text_is_signed_decimals_and_comes_back(most: int, least: int) -> None:
    txn = TxnId(most, least)
    for part in str(txn).split("_"):
        assert -(2**63) <= int(part) < 2**63
    assert TxnId.parse(str(txn)) == txn
    assert TxnId.parse(str(txn.root)).root == txn.root


@pytest.mark.parametrize(
    "text",
    ["", "1", "1_", "_1", "a_b", "1_2_3", "01_2", "+1_2", " 1_2", "1_ 2", "1_2 ", f"{2**63}_0", "-0_1", "1.0_2", "(1,2)"],
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="is no transaction id; it looks like 3_1048576"):
        TxnId.parse(text)
