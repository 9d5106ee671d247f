"""`TxnId`: how a transaction is named, and how its id names its root.

The least bits are `serial * 2**20 + sub`: sub 0 is an ordinary transaction or a decider, any other is a sub-transaction whose
outcome its root decides. Text is `{most}_{least}`, both as signed decimals, wherever a transaction is part of a path.
"""

from __future__ import annotations

from typing import NamedTuple

from braid.errors import InvalidArgument

SUB_BITS = 20
MAX_SUB = (1 << SUB_BITS) - 1
MAX_SERIAL = (1 << 43) - 1
"""So that the least bits stay positive in clients that take them for signed."""
_WORD = 1 << 64
_HALF = 1 << 63


class TxnId(NamedTuple):
    """A transaction: `most` is its coordinator partition; both are unsigned 64-bit, as on the wire."""

    most: int
    least: int

    @classmethod
    def of(cls, coordinator: int, serial: int, sub: int = 0) -> TxnId:
        return cls(coordinator, (serial << SUB_BITS) | sub)

    @classmethod
    def parse(cls, text: str) -> TxnId:
        """From `{most}_{least}`. Raises InvalidArgument."""
        most, _, least = text.partition("_")
        try:
            found = cls(int(most) % _WORD, int(least) % _WORD)
        except ValueError:
            found = None
        if found is None or str(found) != text:
            raise InvalidArgument(f"{text!r} is no transaction id; it looks like 3_1048576 (most bits, least bits).")
        return found

    @property
    def sub(self) -> int:
        return self.least & MAX_SUB

    @property
    def serial(self) -> int:
        return self.least >> SUB_BITS

    @property
    def root(self) -> TxnId:
        """The transaction whose header decides this one."""
        return TxnId(self.most, self.least & ~MAX_SUB)

    def with_sub(self, sub: int) -> TxnId:
        return TxnId(self.most, (self.least & ~MAX_SUB) | sub)

    def __str__(self) -> str:
        return f"{_signed(self.most)}_{_signed(self.least)}"


def _signed(bits: int) -> int:
    return bits - _WORD if bits >= _HALF else bits
