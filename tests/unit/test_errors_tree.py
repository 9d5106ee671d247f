"""The error tree: one class per wire code, and every class survives the way over the wire."""

from __future__ import annotations

import pytest

from braid.errors import BY_CODE, Advice, BraidError, InvariantBroken, UnknownFailure, from_code, invariant
from braid.wire.types import ServerError


def classes() -> list[type[BraidError]]:
    found: list[type[BraidError]] = []
    pending: list[type[BraidError]] = [BraidError]
    while pending:
        cls = pending.pop()
        found.append(cls)
        pending.extend(cls.__subclasses__())
    return found


def test_every_wire_code_has_one_class() -> None:
    assert sorted(BY_CODE) == sorted(ServerError)
    for code, cls in BY_CODE.items():
        error = from_code(code, "why")
        assert type(error) is cls
        assert (error.code, error.message) == (code, "why")


def test_an_unknown_code_is_still_an_error() -> None:
    assert type(from_code(999, "new")) is UnknownFailure


def test_every_error_can_be_sent_and_shown() -> None:
    for cls in classes():
        assert cls.code in BY_CODE
        assert 400 <= cls.status <= 599
        assert isinstance(cls.advice, Advice)


def test_a_broken_invariant_is_no_ordinary_error() -> None:
    invariant(True, "INV1", "fine")
    with pytest.raises(InvariantBroken, match="INV1: receipt before fsync"):
        invariant(False, "INV1", "receipt before fsync")
    assert not issubclass(InvariantBroken, BraidError)
