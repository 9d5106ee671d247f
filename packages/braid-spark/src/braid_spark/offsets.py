"""The offset document of a stream: how far each topic was read, as Spark keeps it in a checkpoint.

    {"v":1,"topics":{"<topic>":{"inc":"5f3a","next":14,"segs":{"12":4711,"13":0},"drained":{"9":880}}}}

`next` is the highest segment id taken in, plus one: every id below it is in `segs` (with the next index to read) or fully read,
every other one starts at 0. `drained` are the segments that this batch read to their ends, `skipped` those of which this batch
lost the beginning, `incs` the incarnations of segments whose log has another one than the topic. `base` is where the topics
begin that the offset before does not name. A symbolic offset, `{"v":1,"from":...}`, stands for a start nobody resolved yet.

Spark compares offsets as text, so a document is only ever written by `Offset.document`. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

import msgspec

from braid.errors import BraidError, ConfigError, InvalidTopicName
from braid.model.names import TopicName

VERSION: Final = 1
EARLIEST: Final = "earliest"
LATEST: Final = "latest"

Index = Annotated[int, msgspec.Meta(ge=0)]
Positions = dict[int, int | Literal["earliest", "latest"]]
"""Of named segments: where to begin or to stop."""
Named = dict[str, Positions | Literal["earliest", "latest"]]
"""Of named topics."""


class BadOffset(BraidError):
    """An offset that this query cannot go on from."""

    status = 409


class Frontier(msgspec.Struct, forbid_unknown_fields=True):
    """How far a topic was read."""

    inc: str
    next: Index
    segs: dict[Index, Index]
    incs: dict[Index, str] = {}

    def document(self) -> dict[str, Any]:
        """The canonical form."""
        shown = {"inc": self.inc, "next": self.next, "segs": _by_id(self.segs)}
        return shown | ({"incs": _by_id(self.incs)} if self.incs else {})


class TopicOffset(Frontier, forbid_unknown_fields=True):
    """The same at the end of a batch, with what this batch finished and lost."""

    drained: dict[Index, Index] = {}
    skipped: dict[Index, Index] = {}

    def document(self) -> dict[str, Any]:
        shown = super().document()
        for name in ("drained", "skipped"):
            if positions := getattr(self, name):
                shown[name] = _by_id(positions)
        return shown


class Offset(msgspec.Struct):
    """A resolved offset."""

    topics: dict[str, TopicOffset]
    base: dict[str, Frontier] = {}

    def document(self) -> dict[str, Any]:
        """The canonical form: equal offsets give equal JSON."""
        shown: dict[str, Any] = {"v": VERSION, "topics": {name: self.topics[name].document() for name in sorted(self.topics)}}
        if self.base:
            shown["base"] = {name: self.base[name].document() for name in sorted(self.base)}
        return shown


class Start(msgspec.Struct, frozen=True):
    """Where to begin or to end, as the user said it: by word, by time, by segment, or by what another query has read."""

    word: Literal["earliest", "latest"] | None = None
    timestamp_ms: int | None = None
    named: Named | None = None
    reached: dict[str, Frontier] | None = None
    """From the offset of a checkpoint. Positions alone would not do: only `next` tells a segment that was read to its end from
    one that was never begun."""

    def said_of(self) -> set[str] | None:
        """The topics it names; None if it says the same of all."""
        given = self.named if self.reached is None else self.reached
        return None if given is None else set(given)

    def document(self) -> dict[str, Any]:
        """The symbolic offset."""
        if self.word is not None:
            return {"v": VERSION, "from": self.word}
        if self.timestamp_ms is not None:
            return {"v": VERSION, "from": {"time": self.timestamp_ms}}
        if self.reached is not None:
            return {"v": VERSION, "from": {"reached": {name: each.document() for name, each in sorted(self.reached.items())}}}
        named = self.named or {}
        topics = {name: each if isinstance(each, str) else _by_id(each) for name, each in sorted(named.items())}
        return {"v": VERSION, "from": {"topics": topics}}


def canonical_json(document: Mapping[str, Any]) -> str:
    """A document as one line of text."""
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False)


def read_offset(document: Any) -> Offset | Start:
    """The offset in a document; raises BadOffset with the reason."""
    if not isinstance(document, Mapping):
        raise BadOffset(f"{_shown(document)} is no offset of a Braid source. Use a checkpoint that such a query wrote.")
    version = document.get("v")
    if version != VERSION or isinstance(version, bool):
        raise BadOffset(
            f"The offset {_shown(document)} has version {version!r}; this connector reads version {VERSION}. Use the connector "
            "that wrote the checkpoint or a newer one, or start with a new checkpoint."
        )
    try:
        if "from" in document:
            return _symbolic(document)
        return _checked(msgspec.convert(dict(document), _Document, str_keys=True))
    except (msgspec.ValidationError, ValueError, ConfigError) as error:
        raise BadOffset(
            f"The offset {_shown(document)} cannot be read: {_reason(error)}. "
            "Restore the checkpoint from a copy, or start with a new one."
        ) from error


def parse_position(text: str, option: str) -> Start:
    """What `startingOffsets` or `endingOffsets` says; raises ConfigError.

    `earliest`, `latest`, or JSON: `{"<topic>": {"<segment>": index}}`, where -2 is the earliest index and -1 the latest one and
    a word may stand in place of the segments. The offset of a checkpoint or of a query's progress may be given too."""
    word = text.strip()
    if word.lower() in (EARLIEST, LATEST):
        return Start(word=EARLIEST if word.lower() == EARLIEST else LATEST)
    try:
        given = json.loads(word)
    except ValueError:
        raise ConfigError(
            f'The option {option} = {text!r} cannot be used: write earliest, latest or JSON such as {{"topic": {{"0": 23}}}}.'
        ) from None
    if isinstance(given, dict) and "v" in given:
        return _of_document(given, option)
    if not isinstance(given, dict) or not given:
        raise ConfigError(
            f'The option {option} = {text!r} cannot be used: write an object of topics, such as {{"topic": {{"0": 23}}}}.'
        )
    return Start(named={_topic(name, option): _positions(name, each, option) for name, each in given.items()})


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    v: int
    topics: dict[str, TopicOffset]
    base: dict[str, Frontier] = {}


def _checked(found: _Document) -> Offset:
    for name, topic in [*found.topics.items(), *found.base.items()]:
        finished = set(topic.drained) if isinstance(topic, TopicOffset) else set()
        if wrong := [number for number in (*topic.segs, *finished) if number >= topic.next]:
            raise ValueError(f"segment {min(wrong)} of {name} is not below next = {topic.next}")
        if both := finished & set(topic.segs):
            raise ValueError(f"segment {min(both)} of {name} is both in segs and in drained")
    return Offset(topics=found.topics, base=found.base)


def _symbolic(document: Mapping[str, Any]) -> Start:
    given = document["from"]
    if given in (EARLIEST, LATEST) and set(document) == {"v", "from"}:
        return Start(word=given)
    if isinstance(given, Mapping) and set(given) == {"time"} and isinstance(given["time"], int):
        return Start(timestamp_ms=given["time"])
    if isinstance(given, Mapping) and set(given) == {"topics"} and isinstance(given["topics"], Mapping):
        return Start(named={name: _positions(name, each, "from") for name, each in given["topics"].items()})
    if isinstance(given, Mapping) and set(given) == {"reached"}:
        return Start(reached=msgspec.convert(given["reached"], dict[str, Frontier], str_keys=True))
    raise ValueError(f"{_shown(given)} says no start")


def _of_document(given: dict[str, Any], option: str) -> Start:
    """A start from a whole offset document."""
    try:
        offset = read_offset(given)
    except BadOffset as error:
        raise ConfigError(f"The option {option} cannot be used: {error}") from None
    if isinstance(offset, Start):
        return offset
    return Start(
        reached={
            name: Frontier(inc=topic.inc, next=topic.next, segs=topic.segs, incs=topic.incs)
            for name, topic in offset.topics.items()
        }
    )


def _topic(name: str, option: str) -> str:
    try:
        return str(TopicName.parse(name))
    except InvalidTopicName as error:
        raise ConfigError(f"The option {option} names the topic {name!r}, which cannot be: {error}") from None


def _positions(name: str, given: Any, option: str) -> Positions | Literal["earliest", "latest"]:
    if isinstance(given, str) and given in (EARLIEST, LATEST):
        return EARLIEST if given == EARLIEST else LATEST
    if not isinstance(given, Mapping) or not given:
        raise ConfigError(
            f"The option {option} gives {given!r} for {name}; write earliest, latest or an index for each segment."
        )
    found: Positions = {}
    for segment, index in given.items():
        if not (isinstance(segment, str) and segment.isascii() and segment.isdecimal()):
            raise ConfigError(f"The option {option} names the segment {segment!r} of {name}; a segment's name is a number.")
        if index == EARLIEST or index == -2:
            found[int(segment)] = EARLIEST
        elif index == LATEST or index == -1:
            found[int(segment)] = LATEST
        elif isinstance(index, int) and not isinstance(index, bool) and index >= 0:
            found[int(segment)] = index
        else:
            raise ConfigError(
                f"The option {option} gives {index!r} for segment {segment} of {name}; "
                "write an index, -2 (earliest) or -1 (latest)."
            )
    return found


def _by_id(items: Mapping[int, Any]) -> dict[str, Any]:
    """In the order of the ids, with the keys JSON needs."""
    return {str(number): items[number] for number in sorted(items)}


def _shown(document: Any) -> str:
    text = document if isinstance(document, str) else json.dumps(document, default=str, ensure_ascii=False)
    return text if len(text) <= 200 else text[:197] + "..."


def _reason(error: Exception) -> str:
    return str(error).rstrip(".")
