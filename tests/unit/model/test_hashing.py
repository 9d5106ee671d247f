"""Murmur3 and what is derived from it, against the vectors of both fact sheets."""

from __future__ import annotations

import pytest

from braid.model.hashing import bucket_hash, consistent_slot, masked, murmur3_x86_32, segment_hash, sticky_slot


@pytest.mark.parametrize(
    ("key", "raw", "plain", "sticky", "consistent", "high", "low"),
    [
        (b"", 0x00000000, 0, 1, 1, 0x0000, 0x0000),
        (b"a", 0x3C2569B2, 1009084850, 27058, 42456, 0x3C25, 0x69B2),
        (b"key-0", 0xE337F8BF, 1664612543, 63679, 23544, 0xE337, 0xF8BF),
        (b"key-1", 0x98B115A0, 414258592, 5536, 11858, 0x98B1, 0x15A0),
        (b"random-ordering-key", 0x3896C8C1, 949405889, 51393, 345, 0x3896, 0xC8C1),
        (bytes.fromhex("bad0bad0"), 0x25BA5A96, 632969878, 23190, 32849, 0x25BA, 0x5A96),
    ],
)
def test_key_shared_vectors(key: bytes, raw: int, plain: int, sticky: int, consistent: int, high: int, low: int) -> None:
    found = murmur3_x86_32(key)
    assert found == raw
    assert masked(found) == plain
    assert sticky_slot(found) == sticky
    assert consistent_slot(found) == consistent
    assert segment_hash(found) == high
    assert bucket_hash(found) == low


@pytest.mark.parametrize(
    ("key", "raw", "segment", "bucket", "mod4", "mod3"),
    [
        ("", 0x00000000, 0x0000, 0x0000, 0, 0),
        ("a", 0x3C2569B2, 0x3C25, 0x69B2, 2, 2),
        ("hello", 0x248BFA47, 0x248B, 0xFA47, 3, 1),
        ("alpha", 0xA9C0133D, 0xA9C0, 0x133D, 1, 1),
        ("bravo", 0xF96964C4, 0xF969, 0x64C4, 0, 0),
        ("charlie", 0xE3460417, 0xE346, 0x0417, 3, 1),
        ("delta", 0xE709432C, 0xE709, 0x432C, 0, 1),
        ("echo", 0x26BA7CFE, 0x26BA, 0x7CFE, 2, 2),
        ("k-0", 0x5A771F53, 0x5A77, 0x1F53, 3, 2),
        ("k-1", 0xBD7718CB, 0xBD77, 0x18CB, 3, 2),
        ("k-2", 0x4376D4E9, 0x4376, 0xD4E9, 1, 0),
        ("user-42", 0xB972DAD0, 0xB972, 0xDAD0, 0, 0),
        ("ключ", 0x9A592042, 0x9A59, 0x2042, 2, 0),
    ],
)
def test_routing_vectors(key: str, raw: int, segment: int, bucket: int, mod4: int, mod3: int) -> None:
    found = murmur3_x86_32(key.encode())
    assert (found, segment_hash(found), bucket_hash(found)) == (raw, segment, bucket)
    assert (masked(found) % 4, masked(found) % 3) == (mod4, mod3)


def test_seed_changes_the_hash() -> None:
    assert murmur3_x86_32(b"hello", seed=1) != murmur3_x86_32(b"hello")


def test_slots_are_never_zero() -> None:
    assert sticky_slot(0x10000) == 1
    assert consistent_slot(65535) == 1
