"""Operations on transactions and sinks. Pure."""

from __future__ import annotations

from types import NoneType

from braid.client.admin_transaction_types import SinkInfo, TransactionInfo
from braid.client.operation import Operation

LIST = "/admin/v3/transactions"
TRANSACTION = f"{LIST}/{{most}}/{{least}}"
SINKS = "/admin/v3/sinks"
SINK = f"{SINKS}/{{sink}}"

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
SINKS_LIST = Operation(
    "sinks",
    "list",
    "GET",
    SINKS,
    list[SinkInfo],
    "Sinks of exactly-once jobs: the batches each has, and the run that writes to it.",
    query=("limit",),
)
SINKS_DESCRIBE = Operation(
    "sinks",
    "describe",
    "GET",
    SINK,
    SinkInfo,
    "One sink: the last batch in its output, the one under way, and the runs that may not write to it any more.",
    "orders-to-revenue",
)
SINKS_DELETE = Operation(
    "sinks",
    "delete",
    "DELETE",
    SINK,
    NoneType,
    "Forget a sink and abort what is being written to it: a job that goes on writes again what it wrote before.",
    "orders-to-revenue --yes",
    is_destructive=True,
)
