"""`braid produce`: send generated messages or lines, keeping a bounded window in flight, and report what became durable."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from braid.cli.progress import Progress
from braid.client import ClientConfig, connect
from braid.client.producer import Producer
from braid.errors import BraidError, ConfigError
from braid.runtime.env import Runtime

WINDOW = 5000
FILLER = b"0123456789abcdefghijklmnopqrstuvwxyz"


class ProduceOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What was asked for on the command line."""

    topic: str
    messages: int | None
    file: Path | None
    text: str | None
    size: int
    rate: float
    key: str | None
    batch: int
    compression: str
    url: str
    is_json: bool


def run(options: ProduceOptions) -> None:
    """Send everything; raises the first failure."""
    if options.file is not None and options.text is not None:
        raise ConfigError("--file and --text exclude each other; give one of them.")
    asyncio.run(_produce(options))


async def _produce(options: ProduceOptions) -> None:
    runtime = Runtime()
    config = ClientConfig(max_pending_messages=WINDOW, batch_max_messages=options.batch)
    async with connect(options.url, config=config, runtime=runtime) as client:
        producer = await client.producer(
            options.topic,
            batching=options.batch > 1,
            compression=options.compression,  # type: ignore[arg-type]
        )
        progress = Progress(runtime.clock, "sent")
        failure = await _send_all(options, producer, progress, runtime)
        await producer.close()
    progress.done()
    if options.is_json:
        sys.stdout.write(msgspec.json.encode({"topic": producer.topic, **progress.summary()}).decode() + "\n")
    if failure is not None:
        raise failure


async def _send_all(options: ProduceOptions, producer: Producer, progress: Progress, runtime: Runtime) -> BraidError | None:
    """Send message after message; stop at the first failure and return it."""
    failures: list[BraidError] = []

    def answered(size: int, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is None:
            progress.add(size)
        elif isinstance(error, BraidError) and not failures:
            failures.append(error)

    start = runtime.clock.monotonic()
    for number, payload in enumerate(_payloads(options)):
        if failures:
            break
        if options.rate:
            await runtime.clock.sleep(max(0.0, start + number / options.rate - runtime.clock.monotonic()))
        key = None if options.key is None else options.key.replace("{i}", str(number))
        await producer.room()
        sent = producer.send_nowait(payload, key=key)
        sent.add_done_callback(partial(answered, len(payload)))
        if number % options.batch == 0:
            await asyncio.sleep(0)  # let batches out and receipts in
    await producer.flush()
    return failures[0] if failures else None


def _payloads(options: ProduceOptions) -> Iterator[bytes]:
    if options.file is not None:
        yield from _lines(options)
        return
    fixed = options.text.encode() if options.text is not None else (FILLER * (options.size // len(FILLER) + 1))[: options.size]
    for _number in range(options.messages or 1):
        yield fixed


def _lines(options: ProduceOptions) -> Iterator[bytes]:
    try:
        with sys.stdin.buffer if str(options.file) == "-" else open(str(options.file), "rb") as stream:  # noqa: PTH123
            for number, line in enumerate(stream):
                if options.messages is not None and number >= options.messages:
                    return
                yield line.rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"The file {options.file} cannot be read: {error.strerror}.") from error
