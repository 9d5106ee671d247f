"""`braid consume`: receive, show and acknowledge messages until a count, a silence, the end of the topic, or Ctrl-C."""

from __future__ import annotations

import asyncio
import base64
import signal
import sys

import msgspec

from braid.cli.progress import Progress
from braid.client import Message, connect
from braid.client.consumer import Consumer
from braid.errors import Closed, DeadlineExceeded, TopicTerminated
from braid.runtime.env import Runtime
from braid.runtime.tasks import Tasks


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
    """Receive until done; raises DeadlineExceeded if `--count` was not reached."""
    asyncio.run(_consume(options))


async def _consume(options: ConsumeOptions) -> None:
    runtime = Runtime()
    progress = Progress(runtime.clock, "received")
    tasks = Tasks("consume")
    async with connect(options.url, runtime=runtime) as client:
        consumer = await client.consumer(
            options.topic,
            options.subscription,
            type=options.type,  # type: ignore[arg-type]
            initial=options.initial,  # type: ignore[arg-type]
        )
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, lambda: tasks.spawn(consumer.close(), "close"))
        try:
            await _receive_all(options, consumer, progress)
        finally:
            await consumer.close()
    progress.done()
    if options.is_json:
        sys.stdout.write(msgspec.json.encode({"topic": consumer.topic, **progress.summary()}).decode() + "\n")
    if options.count is not None and progress.count < options.count and options.timeout is not None:
        raise DeadlineExceeded(f"Only {progress.count} of {options.count} messages came from {consumer.topic}.")


async def _receive_all(options: ConsumeOptions, consumer: Consumer, progress: Progress) -> None:
    while options.count is None or progress.count < options.count:
        try:
            message = await consumer.receive(options.timeout)
        except (DeadlineExceeded, TopicTerminated, Closed):
            break
        if not options.is_quiet:
            _show(message, options.is_json)
        await consumer.acknowledge(message, wait=progress.count + 1 == options.count)
        progress.add(len(message.payload))
    sys.stdout.flush()


def _show(message: Message, is_json: bool) -> None:
    if not is_json:
        sys.stdout.buffer.write(message.payload + b"\n")
        return
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
    sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
