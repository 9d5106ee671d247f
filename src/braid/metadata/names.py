"""Names, keys and their bounds: what may stand in a key and how any text becomes a name.

Pure. Names are ordered by UTF-8 bytes; Python compares strings by code point, which is the same order as long as every
character can be encoded, so lone surrogates are refused and plain strings are compared everywhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from braid.errors import InvalidArgument, ValueTooLarge
from braid.metadata.api import IndexSpan, Span

MAX_NAME: Final = 4096
"""Bytes of one name or secondary key."""
MAX_KEY: Final = 16384
"""Bytes of a whole key."""
MAX_INDEX_ENTRIES: Final = 256
"""Index entries of one record."""

_UNSAFE = re.compile("[/%\x00-\x1f\x7f-\x9f]")
_ESCAPED = re.compile(b"%([0-9A-F]{2})")
_NUMBERS = re.compile(r"(?:-\d{20})+\Z", re.ASCII)


def encode_name(text: str) -> str:
    """Any text as a name: `/`, `%` and control characters become `%XX` per UTF-8 byte. Not empty in, not empty out."""
    _encodable(text, "The text")
    return _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match.group().encode()), text)


def decode_name(name: str) -> str:
    """The text that `encode_name` was given."""
    try:
        return _ESCAPED.sub(lambda match: bytes([int(match.group(1), 16)]), name.encode()).decode()
    except UnicodeError as exc:
        raise InvalidArgument(f"The name {name!r} is not percent-encoded UTF-8.") from exc


def check_key(key: str) -> None:
    """Refuse a key that is not a path of non-empty names."""
    if not key.startswith("/") or key.endswith("/") or "//" in key:
        raise InvalidArgument(f"The key {key!r} is not a path: it must start with '/' and have no empty component.")
    size = _encodable(key, "The key")
    if size > MAX_KEY:
        raise ValueTooLarge(f"A key of {size} bytes is above the limit of {MAX_KEY}; shorten its names.")
    if size > MAX_NAME and any(len(name.encode()) > MAX_NAME for name in key.split("/")):
        raise ValueTooLarge(f"The key {key[:80]!r}... has a name above the limit of {MAX_NAME} bytes; shorten it.")


def check_index(index: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """The entries of a record in canonical form."""
    if len(index) > MAX_INDEX_ENTRIES:
        raise ValueTooLarge(f"A record may have {MAX_INDEX_ENTRIES} index entries, not {len(index)}.")
    for name, secondary in index.items():
        if not name:
            raise InvalidArgument("An index needs a name.")
        _check_part(name, "The index name")
        _check_part(secondary, "The secondary key")
    return tuple(sorted(index.items()))


def span_bounds(span: Span) -> tuple[str, str, str]:
    """Parent and half-open key bounds of a span. Keys of one collection are ordered like their names."""
    parent = "" if span.parent == "/" else span.parent
    if span.parent != "/":
        check_key(parent)
    for bound in (span.lo, span.hi):
        if bound is not None:
            _check_part(bound, "The bound", MAX_NAME + 1)  # one byte more bounds the longest name from above
    low = f"{parent}/{span.lo or ''}"
    high = parent + "0" if span.hi is None else f"{parent}/{span.hi}"  # '0' follows '/'
    return parent, low, high


def check_index_span(span: IndexSpan) -> None:
    """Refuse bounds that no entry could have."""
    _check_part(span.name, "The index name")
    for bound in (span.lo, span.hi):
        if bound is not None:
            _check_part(bound, "The bound", MAX_NAME + 1)  # one byte more bounds the longest name from above


def sequence_numbers(key: str, prefix: str) -> tuple[int, ...] | None:
    """The numbers of a key of the sequence `prefix`, or None if it is no member."""
    suffix = key[len(prefix) :]
    if not key.startswith(prefix) or not _NUMBERS.fullmatch(suffix):
        return None
    return tuple(int(part) for part in suffix[1:].split("-"))


def sequence_key(prefix: str, numbers: tuple[int, ...]) -> str:
    """The key of a sequence's member."""
    if max(numbers) >= 10**20:
        raise InvalidArgument(f"The sequence {prefix!r} is exhausted: its next number has more than 20 digits.")
    return prefix + "".join(f"-{number:020d}" for number in numbers)


def sequence_prefixes(key: str) -> list[str]:
    """Every prefix of which `key` looks like a member: none for most keys, two for one with two numbers."""
    prefixes = []
    while len(key) > 21 and key[-21] == "-" and _NUMBERS.fullmatch(key[-21:]):
        key = key[:-21]
        prefixes.append(key)
    return prefixes


def wrong_partition(key: str, stored: str | None, given: str | None) -> InvalidArgument:
    """The error of a caller that names another partition than the record has."""
    return InvalidArgument(f"The record {key} lives in partition {stored!r}, but the call names {given!r}.")


def _check_part(text: str, what: str, limit: int = MAX_NAME) -> None:
    if text.isascii() and len(text) <= limit and "/" not in text:  # nearly always
        return
    if "/" in text:
        raise InvalidArgument(f"{what} {text!r} contains '/'; encode it with encode_name.")
    size = _encodable(text, what)
    if size > limit:
        raise ValueTooLarge(f"{what} {text[:80]!r}... has {size} bytes, above the limit of {limit}.")


def _encodable(text: str, what: str) -> int:
    """Bytes of `text` in UTF-8."""
    if text.isascii():
        return len(text)
    try:
        return len(text.encode())
    except UnicodeEncodeError as exc:
        raise InvalidArgument(f"{what} {text!r} has a character that UTF-8 cannot encode.") from exc
