"""`AdminClient.transactions`."""

from __future__ import annotations

import re
from datetime import timedelta

from braid.client import operations_transactions as ops
from braid.client.admin_calls import Calls
from braid.client.admin_transaction_types import TransactionInfo
from braid.client.consumer_origin import is_none_or
from braid.errors import InvalidArgument

Infos = list[TransactionInfo]
DEFAULT_LIMIT = 1000
MAX_LIMIT = 10_000
_HALF, _WORD = 1 << 63, 1 << 64
_ID = re.compile(r"\(?(-?\d{1,20})(?:_|:|,| )\s*(-?\d{1,20})\)?", re.ASCII)
"""As Braid writes it, and as clients of Pulsar print it: 3_1048576, 3:1048576, (3,1048576)."""


class Transactions(Calls):
    """Transactions of the whole cluster; any broker can be asked. One is named by its id, such as `3_1048576`."""

    async def list(self, *, min_age: timedelta | None = None, limit: int = DEFAULT_LIMIT) -> Infos:
        """Open transactions that are at least `min_age` old, the oldest first, with what each holds back."""
        if not is_none_or(min_age, timedelta):
            raise InvalidArgument(f"min_age={min_age!r:.100} is no timedelta; give timedelta(minutes=5), for example.")
        age_ms = 0 if min_age is None else min_age // timedelta(milliseconds=1)
        if age_ms < 0:
            raise InvalidArgument(f"The age of a transaction cannot be negative: {min_age}.")
        if type(limit) is not int or not 1 <= limit <= MAX_LIMIT:
            raise InvalidArgument(f"From 1 to {MAX_LIMIT} transactions can be listed, not {limit!r:.100}.")
        return await self._call(ops.TRANSACTIONS_LIST, {}, {"minAgeMs": age_ms, "limit": limit})

    async def describe(self, transaction: str) -> TransactionInfo:
        """One transaction, open or lately finished, with what is not settled yet."""
        return await self._call(ops.TRANSACTIONS_DESCRIBE, transaction_parts(transaction))

    async def abort(self, transaction: str) -> None:
        """Abort an open transaction. One that was aborted before is fine; a committed one is refused (Conflict)."""
        await self._call(ops.TRANSACTIONS_ABORT, transaction_parts(transaction))


def transaction_parts(transaction: str) -> dict[str, str]:
    """The parts of a transaction's path; raises InvalidArgument."""
    match = _ID.fullmatch(str(transaction).strip())
    most, least = (int(match[1]), int(match[2])) if match is not None else (_WORD, _WORD)
    if not (-_HALF <= most < _WORD and -_HALF <= least < _WORD):
        raise InvalidArgument(
            f"{str(transaction)[:100]!r} is no transaction id; it is two numbers, most and least significant bits, "
            "such as 3_1048576."
        )
    return {"most": _signed(most), "least": _signed(least)}


def _signed(bits: int) -> str:
    return str(bits - _WORD if bits >= _HALF else bits)
