"""`braid consume`: receive, show and acknowledge messages until a count, a silence, the end of the topic, or Ctrl-C.

A message is acknowledged after it was written to standard output: what a full disk or a closed pipe did not take comes again.
Scalable topics are read in order per key by a stream consumer, with `--type shared` by a queue consumer; a short name stands
for the scalable topic of that name if there is one, as for `braid produce`.
"""

from __future__ import annotations

import asyncio
import base64
from contextlib import AsyncExitStack

import msgspec

from braid.cli.interrupt import Interrupt, Interrupted
from braid.cli.output import emit
from braid.cli.progress import Progress
from braid.client import Client, Message, connect
from braid.client.consumer import Consumer
from braid.client.layouts import LayoutSession
from braid.client.queue_consumer import QueueConsumer
from braid.client.stream_consumer import StreamConsumer
from braid.errors import DeadlineExceeded, NotAllowed, NotFound, TopicTerminated
from braid.model.names import Domain, TopicName
from braid.runtime.env import Runtime

AnyConsumer = Consumer | StreamConsumer | QueueConsumer
SETTLE_MESSAGES = 1000
"""Messages shown and not acknowledged yet, at most."""


class ConsumeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    topic: str
    subscription: str
    type: str
    initial: str
    count: int | None
    timeout: float | None
    is_quiet: bool
    url: str
    is_json: bool


def run(options: ConsumeOptions) -> None:
    """Receive until done; raises DeadlineExceeded, TopicTerminated or Interrupted if `--count` was not reached."""
    asyncio.run(_consume(options))


async def _consume(options: ConsumeOptions) -> None:
    runtime = Runtime()
    with Interrupt() as interrupt:
        async with AsyncExitStack() as stack:
            with interrupt.may_cancel():
                client = await stack.enter_async_context(connect(options.url, runtime=runtime))
                consumer = await _open(client, options)
            consumption = _Consumption(options, consumer, Progress(runtime.clock, "received"))
            ended = await consumption.run(interrupt)
    progress = consumption.progress
    progress.done()
    if options.is_json:
        emit(msgspec.json.encode({"topic": consumer.topic, **progress.summary()}) + b"\n")
    if ended is None or options.count is None:
        return
    text = f"Only {progress.count} of {options.count} messages came from {consumer.topic}"
    raise type(ended)(f"{text}, which was terminated." if isinstance(ended, TopicTerminated) else f"{text}.")


async def _open(client: Client, options: ConsumeOptions) -> AnyConsumer:
    """The consumer for this kind of topic."""
    subscription, initial = options.subscription, options.initial
    name = await _resolved(client, TopicName.parse(options.topic))
    topic = str(name)
    if name.domain is not Domain.TOPIC:
        return await client.consumer(topic, subscription, type=options.type, initial=initial)  # type: ignore[arg-type]
    if options.type == "shared":
        return await client.queue_consumer(topic, subscription, initial=initial)  # type: ignore[arg-type]
    return await client.stream_consumer(topic, subscription, initial=initial)  # type: ignore[arg-type]


async def _resolved(client: Client, name: TopicName) -> TopicName:
    """The topic a name stands for: the scalable one of that name, if there is one, as for producers."""
    is_plain = name.domain is not Domain.PERSISTENT or name.is_partition
    if is_plain or not (await client.service_connection()).supports_scalable_topics:
        return name
    layouts = LayoutSession(client, str(name), may_create=False)
    try:
        await layouts.open()
        return name if layouts.is_synthetic else layouts.resolved
    except (NotFound, NotAllowed):  # it is yet to be made, or these brokers have no scalable topics
        return name
    finally:
        await layouts.close()


class _Consumption:
    """The messages shown so far, and those among them that are still to be acknowledged."""

    def __init__(self, options: ConsumeOptions, consumer: AnyConsumer, progress: Progress) -> None:
        self.progress = progress
        self._options = options
        self._consumer = consumer
        self._shown: list[Message] = []

    async def run(self, interrupt: Interrupt) -> DeadlineExceeded | TopicTerminated | Interrupted | None:
        """Receive until something ends it; returns what did, None if it was the count."""
        options = self._options
        while options.count is None or self.progress.count < options.count:
            message = self._consumer.receive_nowait()
            if message is None or len(self._shown) >= SETTLE_MESSAGES:
                await self._settle()
            if message is None:
                try:
                    with interrupt.may_cancel():
                        message = await self._consumer.receive(options.timeout)
                except (DeadlineExceeded, TopicTerminated, Interrupted) as error:
                    return error
            if not options.is_quiet:
                emit(_line(message, options.is_json), flush=False)
            self._shown.append(message)
            self.progress.add(len(message.payload))
            if interrupt.is_set:
                await self._settle()
                return Interrupted("interrupted")
        await self._settle(wait=True)
        return None

    async def _settle(self, *, wait: bool = False) -> None:
        """Bring out what was written, then acknowledge it; with `wait`, until that is durable."""
        shown, self._shown = self._shown, []
        if shown and not self._options.is_quiet:
            emit(b"")
        if isinstance(self._consumer, StreamConsumer):
            if shown:
                await self._consumer.acknowledge_cumulative(shown[-1], wait=wait)
            return
        for number, message in enumerate(shown, 1):
            await self._consumer.acknowledge(message, wait=wait and number == len(shown))


def _line(message: Message, is_json: bool) -> bytes:
    if not is_json:
        return message.payload + b"\n"
    try:
        payload: dict[str, str] = {"payload": message.payload.decode()}
    except UnicodeDecodeError:
        payload = {"payload_base64": base64.b64encode(message.payload).decode()}
    event = {
        "id": str(message.id),
        "topic": message.topic,
        "key": message.key,
        "properties": dict(message.properties),
        "publish_ms": message.publish_ms,
        "producer": message.producer,
        "sequence_id": message.sequence_id,
        "redelivery_count": message.redelivery_count,
        **payload,
    }
    return msgspec.json.encode(event) + b"\n"
