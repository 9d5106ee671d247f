"""Operations on transactions. Pure."""

from __future__ import annotations

from types import NoneType

from braid.client.admin_transaction_types import TransactionInfo
from braid.client.operation import Operation

LIST = "/admin/v3/transactions"
TRANSACTION = f"{LIST}/{{most}}/{{least}}"

TRANSACTIONS_LIST = Operation(
    "transactions",
    "list",
    "GET",
    LIST,
    list[TransactionInfo],
    "Open transactions, the oldest first, with what each holds back.",
    "--min-age 5m",
    query=("minAgeMs", "limit"),
)
TRANSACTIONS_DESCRIBE = Operation(
    "transactions",
    "describe",
    "GET",
    TRANSACTION,
    TransactionInfo,
    "One transaction, open or lately finished, with everything of it that is not settled yet.",
    "3_1048576",
)
TRANSACTIONS_ABORT = Operation(
    "transactions",
    "abort",
    "DELETE",
    TRANSACTION,
    NoneType,
    "Abort an open transaction: nothing it did ever counts, and what it holds back is let go.",
    "3_1048576 --yes",
    is_destructive=True,
    may_repeat=True,
)
