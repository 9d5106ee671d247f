"""Topic and namespace names: parsing, the four domains, partitions, segments and the names storage uses.

Owns every rule about what a name may look like. A refused name raises `InvalidTopicName` with a sentence that says what is
wrong. Names are never URL-encoded in memory, only on their way into a storage path (`encode`), so that a name has one
identity. Pure; parsed names are cached.
"""

from __future__ import annotations

import re
import unicodedata
from enum import StrEnum
from functools import lru_cache
from typing import Final
from urllib.parse import quote, unquote

import msgspec

from braid.errors import InvalidArgument, InvalidTopicName
from braid.model.hashranges import MAX_HASH, HashRange

MAX_NAME_LENGTH: Final = 2048
MAX_NEW_LENGTH: Final = 255
"""Characters of the local name of a new topic, and of a subscription's name."""
_HARMFUL: Final = re.compile(r"""[\\/"'<>]|%[0-9A-Fa-f]{2}""")
MAX_STORED_LENGTH: Final = 4000
MAX_STORED_PARTITION: Final = 4096
RESERVED_PREFIXES: Final = ("__", "_braid.")
RESERVED_SUBSCRIPTIONS: Final = ("pulsar.dedup", "__compaction")
RESERVED_SUBSCRIPTION_PREFIX: Final = "pulsar.repl"
"""Local names of topics that only brokers make begin so."""
MAX_PARTITION_INDEX: Final = (1 << 31) - 1
_MAX_SEGMENT_ID: Final = (1 << 63) - 1
_CACHED: Final = 20_000
_PART = re.compile(r"[-=:.\w]+", re.ASCII)
_PARTITION = re.compile(r"(?P<base>.+)-partition-(?P<index>0|[1-9][0-9]{0,9})", re.DOTALL)
_INVISIBLE = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
"""Unicode categories: control, format, surrogate, line and paragraph separators."""
_DESCRIPTOR = re.compile(r"([0-9a-fA-F]{1,8})-([0-9a-fA-F]{1,8})-([0-9]{1,19})")


class Domain(StrEnum):
    """What stands before `://`."""

    PERSISTENT = "persistent"
    NON_PERSISTENT = "non-persistent"
    TOPIC = "topic"
    SEGMENT = "segment"


class NamespaceName(msgspec.Struct, frozen=True, order=True):
    """`tenant/namespace`."""

    tenant: str
    local_name: str

    @staticmethod
    def parse(text: str) -> NamespaceName:
        """Read `tenant/namespace`; raises InvalidTopicName."""
        return _parse_namespace(text)

    def __str__(self) -> str:
        return f"{self.tenant}/{self.local_name}"


class SegmentDescriptor(msgspec.Struct, frozen=True):
    """The last part of a segment's name: its hash range and id, `0000-7fff-3`."""

    hash_range: HashRange
    segment_id: int

    def __str__(self) -> str:
        return f"{self.hash_range.hex}-{self.segment_id}"


class TopicName(msgspec.Struct, frozen=True, eq=False):
    """A valid topic name; `str(name)` is its full form. Two names are equal if their full forms are."""

    domain: Domain
    tenant: str
    namespace_portion: str
    local_name: str
    """Everything behind the namespace, with partition suffix or segment descriptor, never URL-encoded."""
    partition_index: int
    """Number of the partition, -1 if the name is not that of a partition."""
    descriptor: SegmentDescriptor | None
    """Of a segment, else None."""
    full: str

    @staticmethod
    def parse(text: str) -> TopicName:
        """Read a full name or a short form (`x`, `tenant/namespace/x`); raises InvalidTopicName."""
        return _parse_topic(text)

    @staticmethod
    def from_managed_ledger_name(text: str) -> TopicName:
        """The inverse of `managed_ledger_name`."""
        return _parse_managed_ledger_name(text)

    def __str__(self) -> str:
        return self.full

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopicName) and self.full == other.full

    def __ne__(self, other: object) -> bool:
        return not self == other  # without it the struct's own answer is that every two objects differ

    def __hash__(self) -> int:
        return hash(self.full)

    def __lt__(self, other: TopicName) -> bool:
        return self.full < other.full

    @property
    def namespace(self) -> NamespaceName:
        """The namespace the topic belongs to."""
        return NamespaceName(self.tenant, self.namespace_portion)

    @property
    def is_persistent(self) -> bool:
        """Whether messages are stored; true for all domains but `non-persistent`."""
        return self.domain is not Domain.NON_PERSISTENT

    @property
    def is_partition(self) -> bool:
        """Whether this is one partition of a partitioned topic."""
        return self.partition_index >= 0

    @property
    def is_trimmed(self) -> bool:
        """Whether the local name has no blanks at its ends. Others exist but are never created."""
        return self.local_name == self.local_name.strip()

    @property
    def base(self) -> TopicName:
        """The partitioned topic of a partition; any other name is its own base."""
        if self.partition_index < 0:
            return self
        return _build(self.domain, self.tenant, self.namespace_portion, _base_local(self.local_name))

    def partition(self, index: int) -> TopicName:
        """The name of this topic's partition `index`."""
        if self.is_partition or self.domain is Domain.SEGMENT:
            raise InvalidArgument(f"{self.full} has no partitions: it is itself a part of a topic.")
        if not 0 <= index <= MAX_PARTITION_INDEX:
            raise InvalidArgument(f"{index} is no partition number of {self.full}; numbers begin at 0.")
        return _build(self.domain, self.tenant, self.namespace_portion, f"{self.local_name}-partition-{index}")

    @property
    def parent(self) -> TopicName:
        """The scalable topic of a segment."""
        if self.descriptor is None:
            raise InvalidArgument(f"{self.full} is no segment and has no parent topic.")
        return _build(Domain.TOPIC, self.tenant, self.namespace_portion, self.local_name.rpartition("/")[0])

    def segment(self, hash_range: HashRange, segment_id: int) -> TopicName:
        """The name of a segment of this scalable topic."""
        if self.domain is not Domain.TOPIC:
            raise InvalidArgument(f"{self.full} has no segments: only topics of the domain topic:// have.")
        descriptor = SegmentDescriptor(HashRange.of(hash_range.start, hash_range.end), segment_id)
        return _build(Domain.SEGMENT, self.tenant, self.namespace_portion, f"{self.local_name}/{descriptor}")

    @property
    def scalable(self) -> TopicName:
        """The one scalable identity that `topic://`, `persistent://`, its partitions and its segments share."""
        if self.domain is Domain.SEGMENT:
            return self.parent
        return _build(Domain.TOPIC, self.tenant, self.namespace_portion, self.base.local_name)

    @property
    def encoded_local_name(self) -> str:
        """The local name as one part of a storage path."""
        return encode(self.local_name)

    @property
    def managed_ledger_name(self) -> str:
        """The name of the topic's log in storage."""
        prefix = f"{self.tenant}/{self.namespace_portion}"
        if self.domain is Domain.SEGMENT:
            parent, _, descriptor = self.local_name.rpartition("/")
            return f"{prefix}/segment/{encode(parent)}/{descriptor}"
        if self.domain is Domain.TOPIC:
            return f"{prefix}/{encode(self.local_name)}"
        return f"{prefix}/{self.domain}/{encode(self.local_name)}"

    @property
    def schema_id(self) -> str:
        """Where the topic's schemas are: one history for all partitions, segments and domains of a name."""
        return f"{self.tenant}/{self.namespace_portion}/{encode(self.scalable.local_name)}"


def encode(text: str) -> str:
    """One part of a storage path: percent-encoded, and never `.` or `..`, which some stores refuse."""
    return quote(text, safe="") if text.strip(".") else text.replace(".", "%2E")


def decode(text: str) -> str:
    """The inverse of `encode`; raises InvalidTopicName."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        raise InvalidTopicName(f"{text!r} is not a percent-encoded name: its bytes are not UTF-8.") from None


@lru_cache(maxsize=_CACHED)
def _parse_namespace(text: str) -> NamespaceName:
    parts = text.split("/")
    if len(parts) != 2:
        hint = " Names with a cluster (tenant/cluster/namespace) are no longer supported." if len(parts) == 3 else ""
        raise InvalidTopicName(f"Namespace {_shown(text)} must have the form tenant/namespace.{hint}")
    _check_namespace(text, parts[0], parts[1])
    return NamespaceName(parts[0], parts[1])


@lru_cache(maxsize=_CACHED)
def _parse_topic(text: str) -> TopicName:
    scheme, separator, rest = text.partition("://")
    if not separator:
        parts = text.split("/")
        if len(parts) == 1:
            return _build(Domain.PERSISTENT, "public", "default", text)
        if len(parts) == 3:
            return _build(Domain.PERSISTENT, *parts)
        raise InvalidTopicName(
            f"Topic name {_shown(text)} has {len(parts)} parts: a short name is <topic> or <tenant>/<namespace>/<topic>."
        )
    try:
        domain = Domain(scheme.lower())
    except ValueError:
        raise InvalidTopicName(
            f"Topic name {_shown(text)} has the unknown domain {_shown(scheme)}: use persistent, non-persistent or topic."
        ) from None
    may_nest = domain in (Domain.TOPIC, Domain.SEGMENT)
    parts = rest.split("/", 2) if may_nest else rest.split("/")
    if len(parts) == 4:
        raise InvalidTopicName(
            f"Topic name {_shown(text)} has four parts; a cluster is no longer part of it: use {domain}://tenant/namespace/topic."
        )
    if len(parts) != 3:
        raise InvalidTopicName(f"Topic name {_shown(text)} must have the form {domain}://tenant/namespace/topic.")
    return _build(domain, parts[0], parts[1], parts[2])


@lru_cache(maxsize=_CACHED)
def _parse_managed_ledger_name(text: str) -> TopicName:
    parts = text.split("/")
    # A segment's five parts look like those of a name with a cluster, so the third part is looked at first.
    if len(parts) == 5 and parts[2] == Domain.SEGMENT:
        return _build(Domain.SEGMENT, parts[0], parts[1], f"{decode(parts[3])}/{parts[4]}")
    if len(parts) == 3:
        return _build(Domain.TOPIC, parts[0], parts[1], decode(parts[2]))
    if len(parts) == 4 and parts[2] in (Domain.PERSISTENT, Domain.NON_PERSISTENT):
        return _build(Domain(parts[2]), parts[0], parts[1], decode(parts[3]))
    raise InvalidTopicName(f"{_shown(text)} is not the storage name of a topic.")


@lru_cache(maxsize=_CACHED)
def _build(domain: Domain, tenant: str, namespace: str, local: str) -> TopicName:
    shown = f"{domain}://{tenant}/{namespace}/{local}"
    if len(shown) > MAX_NAME_LENGTH:
        raise InvalidTopicName(f"Topic name {_shown(shown)} has {len(shown)} characters; the limit is {MAX_NAME_LENGTH}.")
    _check_namespace(shown, tenant, namespace)
    if not local.strip():
        raise InvalidTopicName(f"Topic name {_shown(shown)} lacks its last part, the topic's own name.")
    _check_characters("Topic name", shown, local)
    _check_stored("Topic name", shown, local, MAX_STORED_LENGTH if _partition_of(local) < 0 else MAX_STORED_PARTITION)
    if domain is Domain.SEGMENT:
        local, descriptor = _canonical_segment(shown, local)
        return TopicName(domain, tenant, namespace, local, -1, descriptor, f"{domain}://{tenant}/{namespace}/{local}")
    return TopicName(domain, tenant, namespace, local, _partition_of(local), None, shown)


def _check_namespace(text: str, tenant: str, namespace: str) -> None:
    for what, part in (("tenant", tenant), ("namespace", namespace)):
        if not _PART.fullmatch(part) or part in (".", ".."):
            raise InvalidTopicName(
                f"{_shown(text)} has the {what} {_shown(part)}: letters, digits and - = : . _ are allowed, at least one, "
                "and neither . nor .. alone."
            )


def check_new_topic(name: TopicName) -> None:
    """Refuse a name under which no topic may be created, whoever asks; raises InvalidTopicName."""
    local = name.local_name
    _check_harmless("topic", local.replace("/", ""))  # a scalable topic may have steps in its name
    if not name.is_trimmed:
        raise InvalidTopicName(f"The topic name {_shown(name.full)} begins or ends with white space.")
    if local.startswith(RESERVED_PREFIXES):
        prefix = next(each for each in RESERVED_PREFIXES if local.startswith(each))
        raise InvalidTopicName(
            f"The topic name {_shown(name.full)} begins with {prefix}, which is kept for the broker's own topics."
        )


def is_reserved_subscription(name: str) -> bool:
    """Whether brokers keep something of their own under this name: no user's subscription can have it."""
    return name in RESERVED_SUBSCRIPTIONS or name.startswith(RESERVED_SUBSCRIPTION_PREFIX)


def check_subscription_name(name: str) -> None:
    """Refuse a name that no subscription can have, however it is given; raises InvalidTopicName."""
    if is_reserved_subscription(name):
        raise InvalidTopicName(f"The subscription name {_shown(name)} is one that brokers use themselves; choose another.")
    if not name.strip() or name != name.strip():
        raise InvalidTopicName(f"The subscription name {_shown(name)} is empty or begins or ends with white space.")
    _check_harmless("subscription", name)
    _check_characters("Subscription name", name, name)
    _check_stored("Subscription name", name, name, MAX_STORED_LENGTH)


def _check_harmless(what: str, name: str) -> None:
    """Refuse what other tools would take for something else: path steps, quotes, markup, escapes; and names nobody can read."""
    harmful = name if name in (".", "..") else "".join(_HARMFUL.findall(name)[:1])
    if harmful:
        raise InvalidTopicName(
            f"The {what} name {_shown(name)} has {harmful} in it, which other tools take for something else."
        )
    if len(name) > MAX_NEW_LENGTH:
        raise InvalidTopicName(f"The {what} name {_shown(name)} has {len(name)} characters; the limit is {MAX_NEW_LENGTH}.")


def _check_characters(what: str, shown: str, local: str) -> None:
    """Refuse what nobody can see or tell apart: control and format characters, and two spellings of one text."""
    if local.isascii():
        if not local.isprintable():
            raise InvalidTopicName(f"{what} {_shown(shown)} holds control characters.")
        return
    for character in local:
        category = unicodedata.category(character)
        if category in _INVISIBLE:
            raise InvalidTopicName(
                f"{what} {_shown(shown)} holds the character U+{ord(character):04X}, which cannot be seen or stored."
            )
    if not unicodedata.is_normalized("NFC", local):
        raise InvalidTopicName(f"{what} {_shown(shown)} is not in the composed Unicode form (NFC); normalise it.")


def _check_stored(what: str, shown: str, local: str, limit: int) -> None:
    """Percent-encoded, as storage keeps it, a name must fit into one part of a path."""
    if len(local) * 12 > limit and len(encode(local)) > limit:
        raise InvalidTopicName(
            f"{what} {_shown(shown)} has {len(encode(local))} characters when encoded; the limit is {limit}."
        )


def _canonical_segment(shown: str, local: str) -> tuple[str, SegmentDescriptor]:
    parent, _, text = local.rpartition("/")
    match = _DESCRIPTOR.fullmatch(text)
    if not parent.strip() or match is None:
        raise InvalidTopicName(
            f"Segment name {_shown(shown)} must end in <topic>/<first hash>-<last hash>-<id>, such as orders/0000-7fff-3."
        )
    start, end, segment_id = int(match[1], 16), int(match[2], 16), int(match[3])
    if not start <= end <= MAX_HASH or segment_id > _MAX_SEGMENT_ID:
        raise InvalidTopicName(
            f"Segment name {_shown(shown)} has no valid hash range: 0000 <= first <= last <= ffff must hold."
        )
    descriptor = SegmentDescriptor(HashRange(start, end), segment_id)
    return f"{parent}/{descriptor}", descriptor


def _partition_of(local: str) -> int:
    match = _PARTITION.fullmatch(local)
    if match is None:
        return -1
    index = int(match["index"])
    return index if index <= MAX_PARTITION_INDEX else -1


def _base_local(local: str) -> str:
    return local[: local.rindex("-partition-")]


def _shown(text: str) -> str:
    """A name for an error message, never endless."""
    return repr(text if len(text) <= 200 else f"{text[:200]}...")
