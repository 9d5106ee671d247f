"""The SDK: `connect(url)` gives a `Client`, which makes producers and consumers.

Imports wire, runtime, model and errors only. Names are imported when first used: a process that only reads in bulk, as those do
that Spark starts, has no use for producers and consumers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from braid.client.checkpoint_consumer import CheckpointConsumer
    from braid.client.checkpoints import Checkpoint
    from braid.client.client import Client, connect
    from braid.client.config import ClientConfig
    from braid.client.consumer import Consumer
    from braid.client.dead_letters import DeadLetterPolicy
    from braid.client.deciders import Decider, SubTransaction
    from braid.client.messages import EARLIEST, LATEST, Message, MessageId
    from braid.client.producer import Producer
    from braid.client.queue_consumer import Backoff, QueueConsumer
    from braid.client.sinks import SinkBegin, SinkCurrent, SinkState
    from braid.client.stream_consumer import StreamConsumer
    from braid.client.transactions import Transaction

__all__ = [
    "EARLIEST",
    "LATEST",
    "Backoff",
    "Checkpoint",
    "CheckpointConsumer",
    "Client",
    "ClientConfig",
    "Consumer",
    "DeadLetterPolicy",
    "Decider",
    "Message",
    "MessageId",
    "Producer",
    "QueueConsumer",
    "SinkBegin",
    "SinkCurrent",
    "SinkState",
    "StreamConsumer",
    "SubTransaction",
    "Transaction",
    "connect",
]

_MODULES = {
    "checkpoint_consumer": ("CheckpointConsumer",),
    "checkpoints": ("Checkpoint",),
    "client": ("Client", "connect"),
    "config": ("ClientConfig",),
    "consumer": ("Consumer",),
    "dead_letters": ("DeadLetterPolicy",),
    "deciders": ("Decider", "SubTransaction"),
    "messages": ("EARLIEST", "LATEST", "Message", "MessageId"),
    "producer": ("Producer",),
    "queue_consumer": ("Backoff", "QueueConsumer"),
    "sinks": ("SinkBegin", "SinkCurrent", "SinkState"),
    "stream_consumer": ("StreamConsumer",),
    "transactions": ("Transaction",),
}
_EXPORTS = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        found = globals()[name] = getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
