"""What holds a subscription up in one log: `blocked_by` of kind `open-transaction` (settled.md), or `unreadable-record`.

A transaction that wrote to the log holds up everybody who has not read past its first entry; one that acknowledged in the
subscription keeps these entries from being done, so that a sealed segment does not drain. Reads only; bounded (INV17).
"""

from __future__ import annotations

from typing import Any, Final

from braid.broker.subscription import Subscription
from braid.broker.topic import Topic
from braid.model.names import is_reserved_subscription
from braid.model.txn import TxnId
from braid.scalable.api import BlockedBy
from braid.scalable.subscription_state import UNREADABLE

MAX_SHOWN: Final = 10
"""Transactions named for one subscription, the oldest; the last says how many `others` there are."""


def passed_over(topic: Topic) -> dict[str, BlockedBy]:
    """Subscriptions whose cursors on this topic cannot be read, and what to say of them."""
    return {
        name: BlockedBy(kind=UNREADABLE, detail={"topic": str(topic.name), "error": error.message})
        for name, error in topic.log.unreadable.items()
        if not is_reserved_subscription(name)
    }


def held_up_by(topic: Topic, subscription: Subscription) -> list[BlockedBy]:
    """The open transactions that hold it up, the oldest first. What sub-transactions hold is told of their root, which is what
    can be aborted."""
    details: dict[TxnId, dict[str, Any]] = {}
    since: dict[TxnId, int] = {}
    if subscription.cursor.backlog():
        for held in topic.transactions.open_transactions():
            if held.position:
                details[held.txn.root] = {"writes": held.writes, "after": held.position}
                since[held.txn.root] = held.since_ms
    if subscription.pending_acks is not None:
        for held in subscription.pending_acks.transactions():
            root = held.txn.root
            detail = details.setdefault(root, {})
            detail["acks"] = detail.get("acks", 0) + held.acks
            since[root] = min(held.since_ms, since.get(root, held.since_ms))
    order = sorted(details, key=lambda root: (since[root], root))
    shown = order[:MAX_SHOWN]
    if len(order) > MAX_SHOWN:
        details[shown[-1]]["others"] = len(order) - MAX_SHOWN
    return [
        BlockedBy(
            kind="open-transaction",
            detail={"transaction": str(root), "topic": str(topic.name), **details[root]},
            since=since[root],
        )
        for root in shown
    ]
