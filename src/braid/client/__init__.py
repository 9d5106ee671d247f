"""The SDK: `connect(url)` gives a `Client`, which makes producers and consumers.

Imports wire, runtime, model and errors only.
"""

from __future__ import annotations

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
