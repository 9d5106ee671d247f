"""The blocking SDK has every public method of the asynchronous one, with the same parameters."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from braid.client import (
    blocking,
    checkpoint_consumer,
    client,
    consumer,
    deciders,
    producer,
    queue_consumer,
    stream_consumer,
    transactions,
)

OF_TRANSACTIONS = {"begin", "check_open", "close", "done", "doom", "fail", "failed", "follow", "hold", "track", "wrote"}
INTERNAL = {
    client.Client: {
        "connection_for",
        "forget",
        "is_connected",
        "keep",
        "locate",
        "new_id",
        "segment_reads",
        "service_connection",
    },
    producer.Producer: {"open"},
    consumer.Consumer: {"drop_queued", "lane_ended", "lane_failed", "open", "put", "wake", "window"},
    transactions.Transaction: OF_TRANSACTIONS,
    deciders.Decider: OF_TRANSACTIONS,
    deciders.SubTransaction: OF_TRANSACTIONS,
}
"""What the parts of the SDK use among themselves."""
OF_SEGMENTS = {"drop_queued", "fail", "lane_ended", "lane_failed", "open", "put", "transaction_ended", "window"}
PAIRS: list[tuple[type[Any], type[Any]]] = [
    (client.Client, blocking.Client),
    (producer.Producer, blocking.Producer),
    (consumer.Consumer, blocking.Consumer),
    (stream_consumer.StreamConsumer, blocking.StreamConsumer),
    (queue_consumer.QueueConsumer, blocking.QueueConsumer),
    (checkpoint_consumer.CheckpointConsumer, blocking.CheckpointConsumer),
    (transactions.Transaction, blocking.Transaction),
    (deciders.Decider, blocking.Decider),
    (deciders.SubTransaction, blocking.SubTransaction),
]


def public(kind: type[Any]) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")} - INTERNAL.get(kind, OF_SEGMENTS)


def parameters(method: Any) -> list[tuple[str, Any, Any]]:
    found = list(inspect.signature(method).parameters.values())[1:]  # without self
    return [(each.name, each.kind, each.default) for each in found]


@pytest.mark.parametrize(("kind", "twin"), PAIRS, ids=[kind.__name__ for kind, _ in PAIRS])
def test_same_methods_and_parameters(kind: type[Any], twin: type[Any]) -> None:
    for name in sorted(public(kind)):
        assert hasattr(twin, name), f"blocking.{twin.__name__} has no {name}"
        mine, other = inspect.getattr_static(kind, name), inspect.getattr_static(twin, name)
        assert isinstance(mine, property) == isinstance(other, property), name
        if not isinstance(mine, property):
            assert parameters(mine) == parameters(other), f"{twin.__name__}.{name}"
            assert other.__doc__, f"{twin.__name__}.{name} is not described"


@pytest.mark.parametrize(("kind", "twin"), PAIRS, ids=[kind.__name__ for kind, _ in PAIRS])
def test_nothing_more(kind: type[Any], twin: type[Any]) -> None:
    attributes = {"config", "name", "subscription", "topic", "url"}  # set on the objects of the asynchronous classes
    assert {name for name in dir(twin) if not name.startswith("_")} <= public(kind) | attributes


@pytest.mark.parametrize(("kind", "twin"), PAIRS, ids=[kind.__name__ for kind, _ in PAIRS])
def test_iteration_and_context(kind: type[Any], twin: type[Any]) -> None:
    assert hasattr(kind, "__aiter__") == hasattr(twin, "__iter__")
    has_end = issubclass(kind, transactions.Transaction)  # these are not closed but ended
    assert hasattr(twin, "__enter__") != has_end
    assert hasattr(twin, "__exit__") != has_end


def test_connect() -> None:
    assert parameters(client.connect) == parameters(blocking.connect)
    assert parameters(client.Client.__init__) == parameters(blocking.Client.__init__)
