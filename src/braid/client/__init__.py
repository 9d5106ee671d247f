"""The SDK: `connect(url)` gives a `Client`, which makes producers and consumers.

Imports wire, runtime, model and errors only.
"""

from __future__ import annotations

from braid.client.client import Client, connect
from braid.client.config import ClientConfig
from braid.client.consumer import Consumer
from braid.client.messages import EARLIEST, LATEST, Message, MessageId
from braid.client.producer import Producer

__all__ = ["EARLIEST", "LATEST", "Client", "ClientConfig", "Consumer", "Message", "MessageId", "Producer", "connect"]
