"""Topic and namespace names."""

from __future__ import annotations

import pytest

from braid.errors import InvalidArgument, InvalidTopicName
from braid.model.hashranges import HashRange
from braid.model.names import Domain, NamespaceName, TopicName, decode, encode


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("x", "persistent://public/default/x"),
        ("t/n/x", "persistent://t/n/x"),
        ("persistent://t/n/x", "persistent://t/n/x"),
        ("PERSISTENT://t/n/x", "persistent://t/n/x"),
        ("non-persistent://t/n/x", "non-persistent://t/n/x"),
        ("topic://t/n/a/b/c", "topic://t/n/a/b/c"),
        ("segment://t/n/orders/0000-7fff-3", "segment://t/n/orders/0000-7fff-3"),
        ("segment://t/n/orders/0-FFFF-3", "segment://t/n/orders/0000-ffff-3"),
        ("segment://t/n/a/b/8000-ffff-12", "segment://t/n/a/b/8000-ffff-12"),
        ("persistent://a-b=c:d.e_f/n/x y%?", "persistent://a-b=c:d.e_f/n/x y%?"),
    ],
)
def test_full_name(text: str, full: str) -> None:
    name = TopicName.parse(text)
    assert str(name) == name.full == full
    assert TopicName.parse(full) == name
    assert hash(TopicName.parse(full)) == hash(name)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "lacks its last part"),
        ("   ", "lacks its last part"),
        ("a/b", "2 parts"),
        ("a/b/c/d", "4 parts"),
        ("persistent://t/c/n/x", "a cluster is no longer part of it"),
        ("persistent://t/n", "must have the form persistent://tenant/namespace/topic"),
        ("persistent://t/n/", "lacks its last part"),
        ("persistent:///n/x", "tenant ''"),
        ("persistent://t//x", "namespace ''"),
        ("persistent://t!/n/x", "tenant 't!'"),
        ("persistent://tä/n/x", "tenant 'tä'"),
        ("http://t/n/x", "unknown domain 'http'"),
        ("topic://t/n", "must have the form topic://"),
        ("segment://t/n/0000-ffff-1", "must end in"),
        ("segment://t/n/x/0000-ffff", "must end in"),
        ("segment://t/n/x/0000-ffff--1", "must end in"),
        ("segment://t/n/x/0000-zzzz-1", "must end in"),
        ("segment://t/n/x/8000-7fff-1", "no valid hash range"),
        ("segment://t/n/x/0000-10000-1", "no valid hash range"),
        ("x" * 3000, "the limit is 2048"),
        ("x\ud800", "cannot be seen or stored"),
    ],
)
def test_refused_names_say_what_is_wrong(text: str, reason: str) -> None:
    with pytest.raises(InvalidTopicName) as refused:
        TopicName.parse(text)
    assert reason in refused.value.message
    assert len(refused.value.message) < 600


@pytest.mark.parametrize(
    ("local", "index", "base"),
    [
        ("x-partition-0", 0, "x"),
        ("x-partition-10", 10, "x"),
        ("x-partition-0-partition-7", 7, "x-partition-0"),
        ("x-partition-01", -1, "x-partition-01"),
        ("x-partition-+1", -1, "x-partition-+1"),
        ("x-partition--1", -1, "x-partition--1"),
        ("x-partition-", -1, "x-partition-"),
        ("x-partition-1a", -1, "x-partition-1a"),
        ("x-partition-٣", -1, "x-partition-٣"),
        ("-partition-1", -1, "-partition-1"),
        ("x-partition-2147483647", 2147483647, "x"),
        ("x-partition-2147483648", -1, "x-partition-2147483648"),
        ("x-partition-1 ", -1, "x-partition-1 "),
    ],
)
def test_partition_suffix(local: str, index: int, base: str) -> None:
    name = TopicName.parse(f"persistent://t/n/{local}")
    assert name.partition_index == index
    assert name.is_partition is (index >= 0)
    assert name.base.local_name == base
    assert name.base.domain is Domain.PERSISTENT


def test_partition_names() -> None:
    name = TopicName.parse("non-persistent://t/n/x")
    assert str(name.partition(3)) == "non-persistent://t/n/x-partition-3"
    assert name.partition(3).base == name
    assert str(TopicName.parse("topic://t/n/a/b").partition(0)) == "topic://t/n/a/b-partition-0"
    with pytest.raises(InvalidArgument, match="numbers begin at 0"):
        name.partition(-1)
    with pytest.raises(InvalidArgument, match="has no partitions"):
        name.partition(3).partition(1)


@pytest.mark.req("R468-60")
def test_segment_names() -> None:
    topic = TopicName.parse("topic://t/n/a/b")
    segment = topic.segment(HashRange(0, 0x7FFF), 1)
    assert str(segment) == "segment://t/n/a/b/0000-7fff-1"
    assert segment.descriptor is not None
    assert str(segment.descriptor) == "0000-7fff-1"
    assert (segment.descriptor.hash_range, segment.descriptor.segment_id) == (HashRange(0, 0x7FFF), 1)
    assert segment.parent == topic
    assert segment.scalable == topic
    assert segment.partition_index == -1
    for wrong in ("persistent://t/n/x", "non-persistent://t/n/x", str(segment)):
        with pytest.raises(InvalidArgument, match="has no segments"):
            TopicName.parse(wrong).segment(HashRange(0, 1), 0)
    with pytest.raises(InvalidArgument, match="no parent topic"):
        _ = topic.parent
    with pytest.raises(InvalidArgument, match="is no hash range"):
        topic.segment(HashRange(5, 4), 0)


@pytest.mark.parametrize(
    ("text", "scalable"),
    [
        ("persistent://t/n/x", "topic://t/n/x"),
        ("persistent://t/n/x-partition-4", "topic://t/n/x"),
        ("topic://t/n/x", "topic://t/n/x"),
        ("persistent://t/n/a b", "topic://t/n/a b"),
        ("segment://t/n/x/0000-ffff-0", "topic://t/n/x"),
    ],
)
def test_one_scalable_identity(text: str, scalable: str) -> None:
    assert str(TopicName.parse(text).scalable) == scalable


@pytest.mark.parametrize(
    ("text", "log", "schema"),
    [
        ("persistent://t/n/x", "t/n/persistent/x", "t/n/x"),
        ("persistent://t/n/x-partition-4", "t/n/persistent/x-partition-4", "t/n/x"),
        ("non-persistent://t/n/x", "t/n/non-persistent/x", "t/n/x"),
        ("topic://t/n/a/b", "t/n/a%2Fb", "t/n/a%2Fb"),
        ("segment://t/n/a/b/0000-7fff-3", "t/n/segment/a%2Fb/0000-7fff-3", "t/n/a%2Fb"),
        ("persistent://t/n/a b/".rstrip("/"), "t/n/persistent/a%20b", "t/n/a%20b"),
        ("persistent://t/n/..", "t/n/persistent/%2E%2E", "t/n/%2E%2E"),
        ("persistent://t/n/ключ", "t/n/persistent/%D0%BA%D0%BB%D1%8E%D1%87", "t/n/%D0%BA%D0%BB%D1%8E%D1%87"),
    ],
)
def test_storage_names(text: str, log: str, schema: str) -> None:
    name = TopicName.parse(text)
    assert name.managed_ledger_name == log
    assert name.schema_id == schema
    assert TopicName.from_managed_ledger_name(log) == name


@pytest.mark.parametrize("text", ["t/n/x/y", "t/c/n/persistent/x", "t/n", "t/n/segment/x", "t/n/persistent/%ff"])
def test_refused_storage_names(text: str) -> None:
    with pytest.raises(InvalidTopicName):
        TopicName.from_managed_ledger_name(text)


def test_encoding_of_path_parts() -> None:
    for text in ("a/b", ".", "..", "...", "a.b", "100%", "a+b c", "é", "", "~*'()"):
        encoded = encode(text)
        assert "/" not in encoded
        assert encoded not in {".", ".."}
        assert decode(encoded) == text


def test_names_are_equal_by_their_full_forms() -> None:
    name, same, other = TopicName.parse("x"), TopicName.parse("persistent://public/default/x"), TopicName.parse("y")
    assert name == same
    assert not name != same  # noqa: SIM202 - the operator itself
    assert name != other
    assert name != "persistent://public/default/x"


def test_properties_of_a_name() -> None:
    name = TopicName.parse("persistent://t/n/ x")
    assert not name.is_trimmed
    assert TopicName.parse("x").is_trimmed
    assert str(name.namespace) == "t/n"
    assert name.is_persistent
    assert not TopicName.parse("non-persistent://t/n/x").is_persistent
    assert name != "persistent://t/n/ x"
    assert TopicName.parse("a") < TopicName.parse("b")


def test_namespace_names() -> None:
    assert NamespaceName.parse("t/n") == NamespaceName("t", "n")
    assert NamespaceName.parse("t/n") < NamespaceName.parse("t/o")
    for text, reason in (
        ("t", "must have the form"),
        ("t/c/n", "no longer supported"),
        ("t/", "namespace ''"),
        ("/n", "tenant ''"),
    ):
        with pytest.raises(InvalidTopicName, match=reason):
            NamespaceName.parse(text)


@pytest.mark.parametrize(
    "local",
    ["a\x00b", "a\nb", "a\tb", "a\x7fb", "zero\u200bwidth", "right\u202eleft", "line\u2028end", "e\u0301"],
    ids=["nul", "newline", "tab", "delete", "zero-width", "right-to-left", "line-separator", "decomposed"],
)
def test_characters_nobody_can_see_or_tell_apart_are_refused(local: str) -> None:
    with pytest.raises(InvalidTopicName, match=r"character|composed"):
        TopicName.parse(f"persistent://public/default/{local}")


def test_text_of_other_scripts_is_welcome() -> None:
    for local in ("ключ", "\u00e9t\u00e9", "注文", "a b", "a@b:c", "€"):
        assert TopicName.parse(f"persistent://public/default/{local}").local_name == local
