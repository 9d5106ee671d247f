"""Ack sets of batches."""

from __future__ import annotations

import pytest

from braid.model.ackset import acknowledged_up_to, from_words, full, to_words


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (0, []),
        (0b101, [5]),
        (full(63), [(1 << 63) - 1]),
        (full(64), [-1]),
        (full(65), [-1, 1]),
        (1 << 64, [0, 1]),
        (1 << 63, [-(1 << 63)]),
    ],
)
def test_words(mask: int, words: list[int]) -> None:
    assert to_words(mask) == words
    assert from_words(words) == mask


def test_trailing_zero_words_mean_nothing() -> None:
    assert from_words([5, 0, 0]) == 5
    assert to_words(from_words([0, 0])) == []


def test_acknowledging_in_steps() -> None:
    unacknowledged = full(10) & from_words([0b1111111110]) & from_words([0b1011111111])
    assert unacknowledged == 0b1011111110
    assert unacknowledged.bit_count() == 8


def test_cumulative_inside_a_batch() -> None:
    assert acknowledged_up_to(4, 1) == 0b1100
    assert acknowledged_up_to(4, -1) == 0b1111
    assert acknowledged_up_to(4, 3) == 0
    assert acknowledged_up_to(4, 99) == 0
