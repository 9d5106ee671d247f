"""The SDK without `await`, for scripts, threads and notebooks' plain cells.

    with connect("pulsar://localhost:6650") as client, client.producer("orders") as producer:
        producer.send(b"...", key="user-42")

Every object here is the asynchronous one of the same name, waited for: the same methods with the same parameters. A client owns
one thread, on which everything made by it lives; all of it may be used from several threads, but not where an event loop runs.
Ctrl-C breaks a wait off and loses nothing. `AdminClient` is the blocking twin of `braid.AdminClient`.
"""

from __future__ import annotations

from braid.client.blocking_admin import (
    AdminClient,
    Brokers,
    Bundles,
    Clusters,
    Namespaces,
    ScalableTopics,
    Segments,
    Subscriptions,
    Tenants,
    Topics,
)
from braid.client.blocking_client import CheckpointConsumer, Client, Consumer, QueueConsumer, StreamConsumer, connect
from braid.client.blocking_producer import Producer
from braid.client.blocking_transactions import Decider, SinkBegin, SubTransaction, Transaction, TransactionScope

__all__ = [
    "AdminClient",
    "Brokers",
    "Bundles",
    "CheckpointConsumer",
    "Client",
    "Clusters",
    "Consumer",
    "Decider",
    "Namespaces",
    "Producer",
    "QueueConsumer",
    "ScalableTopics",
    "Segments",
    "SinkBegin",
    "StreamConsumer",
    "SubTransaction",
    "Subscriptions",
    "Tenants",
    "Topics",
    "Transaction",
    "TransactionScope",
    "connect",
]
