"""Every kind of record that brokers write to the metadata store, by its key.

`World.close` of the broker's tests refuses a key that is none of these, so whoever adds a kind adds it here; and
`test_spoilt_records.py` refuses a kind without cases, so it is also shown what a broker does with a damaged one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_TOPIC = r"/[^/]+/[^/]+/[^/]+"
_LOG = r"/managed-ledgers/[^/]+/[^/]+/(persistent/[^/]+|segment/[^/]+/[^/]+)"
DURABLE = {
    "cluster": r"/admin/clusters/[^/]+",
    "tenant": r"/admin/tenants/[^/]+",
    "namespace": r"/admin/namespaces/[^/]+/[^/]+",
    "partitioned topic": rf"/admin/partitioned-topics{_TOPIC}/[^/]+",
    "log": _LOG,
    "cursor": rf"{_LOG}/[^/]+",
    "schema": rf"/schemas{_TOPIC}",
    "scalable topic": rf"/topics{_TOPIC}",
    "subscription": rf"/topics{_TOPIC}/subscriptions/[^/]+",
    "registration": rf"/topics{_TOPIC}/subscriptions/[^/]+/consumers/[^/]+",
    "subscription of a regular topic": rf"/regular-topics{_TOPIC}/subscriptions/[^/]+",
    "registration of a regular topic": rf"/regular-topics{_TOPIC}/subscriptions/[^/]+/consumers/[^/]+",
    "transaction": r"/txn/[^/]+",
    "operation of a transaction": r"/txn-op/[^/]+/[^/]+",
    "sub-transaction": r"/txn-sub/[^/]+/[^/]+",
    "aborted transaction": r"/txn-aborted/[^/]+/[^/]+",
    "serials": r"/txn-serial/[0-9]+",
    "number of coordinators": r"/txn-tc/parallelism",
    "sink": r"/sinks/[^/]+",
    "hint": r"/loadbalance/hints/[^/]+/[^/]+/[^/]+",
}
EPHEMERAL = {
    "broker": r"/loadbalance/brokers/[^/]+",
    "leader of the brokers": r"/loadbalance/leader",
    "lock of a bundle": r"/namespace/[^/]+/[^/]+/[^/]+",
    "leader of a scalable topic": rf"/topics{_TOPIC}/controller",
    "leader of a regular topic": rf"/regular-topics{_TOPIC}/controller",
    "transaction coordinator": r"/txn-tc/leader/[0-9]+",
}
_PATTERNS = {name: re.compile(pattern) for name, pattern in (DURABLE | EPHEMERAL).items()}


def kind_of(key: str) -> str | None:
    """What a record is; None if nobody said."""
    return next((name for name, pattern in _PATTERNS.items() if pattern.fullmatch(key)), None)


def unknown(keys: Iterable[str]) -> list[str]:
    """Those of no kind that is listed here."""
    return sorted(key for key in keys if kind_of(key) is None)
