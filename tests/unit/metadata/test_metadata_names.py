"""Names and keys."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import InvalidArgument, ValueTooLarge
from braid.metadata.api import Span
from braid.metadata.names import (
    MAX_INDEX_ENTRIES,
    MAX_KEY,
    MAX_NAME,
    check_index,
    check_key,
    decode_name,
    encode_name,
    sequence_key,
    sequence_numbers,
    sequence_prefixes,
    span_bounds,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@given(texts)
def test_encoding_is_reversible_and_makes_a_name(text: str) -> None:
    name = encode_name(text)
    assert decode_name(name) == text
    check_key("/" + name)
    assert not any(ord(char) < 32 or 127 <= ord(char) < 160 or char == "/" for char in name)


@given(texts, texts)
def test_strings_are_ordered_like_their_bytes(a: str, b: str) -> None:
    assert (a < b) == (a.encode() < b.encode())


def test_encoding_by_example() -> None:
    assert encode_name("a/b%c\n\x80é") == "a%2Fb%25c%0A%C2%80é"
    with pytest.raises(InvalidArgument):
        encode_name("\ud800")
    with pytest.raises(InvalidArgument):
        decode_name("%FF")


def test_limits() -> None:
    check_key("/" + "n" * MAX_NAME)
    with pytest.raises(ValueTooLarge):
        check_key("/a/" + "n" * (MAX_NAME + 1) + "/b")
    with pytest.raises(ValueTooLarge):
        check_key("/" + "é" * (MAX_NAME // 2 + 1))
    with pytest.raises(ValueTooLarge):
        check_key(("/" + "n" * MAX_NAME) * (MAX_KEY // MAX_NAME + 1))
    check_index({f"i{n}": "s" for n in range(MAX_INDEX_ENTRIES)})
    with pytest.raises(ValueTooLarge):
        check_index({f"i{n}": "s" for n in range(MAX_INDEX_ENTRIES + 1)})
    with pytest.raises(ValueTooLarge):
        check_index({"i": "s" * (MAX_NAME + 1)})


def test_span_bounds() -> None:
    assert span_bounds(Span("/a")) == ("/a", "/a/", "/a0")
    assert span_bounds(Span("/")) == ("", "/", "0")
    assert span_bounds(Span("/a", "b", "c")) == ("/a", "/a/b", "/a/c")
    span_bounds(Span("/a", hi="n" * MAX_NAME + "\x00"))
    for parent in ("", "a", "/a/"):
        with pytest.raises(InvalidArgument):
            span_bounds(Span(parent))


def test_sequence_keys() -> None:
    key = sequence_key("/a/s", (3, 14))
    assert key == "/a/s-00000000000000000003-00000000000000000014"
    assert sequence_numbers(key, "/a/s") == (3, 14)
    assert sequence_numbers(key, "/a/s-00000000000000000003") == (14,)
    assert sequence_prefixes(key) == ["/a/s-00000000000000000003", "/a/s"]
    for other in ("/a/s", "/a/s-3", "/a/t-00000000000000000003", "/a/s-00000000000000000003x", "/a/s-٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٠٣"):
        assert sequence_numbers(other, "/a/s") is None
        assert "/a/s" not in sequence_prefixes(other)
    with pytest.raises(InvalidArgument):
        sequence_key("/a/s", (10**20,))
