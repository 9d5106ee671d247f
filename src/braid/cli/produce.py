"""`braid produce`: send generated messages or lines, keeping a bounded window in flight, and report what became durable."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from braid.cli.admin_output import note
from braid.cli.interrupt import Interrupt
from braid.cli.output import emit
from braid.cli.progress import Progress
from braid.client import Client, ClientConfig, connect
from braid.client.layouts import LayoutSession
from braid.client.producer import Producer
from braid.errors import BraidError, ConfigError, TopicNotFound
from braid.runtime.env import Runtime
from braid.wire import requests

WINDOW = 5000
READ_BYTES = 64 << 10
MAX_LINE_BYTES = 128 << 20
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
    with Interrupt() as interrupt:
        async with AsyncExitStack() as stack:
            with interrupt.may_cancel():
                client = await stack.enter_async_context(connect(options.url, config=config, runtime=runtime))
                is_new = sys.stderr.isatty() and await _is_new(client, options.topic)  # a hint for people: scripts get none
                producer = await client.producer(
                    options.topic,
                    batching=options.batch > 1,
                    compression=options.compression,  # type: ignore[arg-type]
                )
            if is_new:
                note(
                    f"{options.topic} is new and has no subscription yet: what nobody reads is kept for a time only, which its "
                    "stats show and a retention policy changes."
                )
            progress = Progress(runtime.clock, "sent")
            failure = await _send_all(options, producer, progress, runtime, interrupt)
            await producer.close()
    progress.done()
    if options.is_json:
        emit(msgspec.json.encode({"topic": producer.topic, **progress.summary()}) + b"\n")
    if failure is not None:
        raise failure


async def _is_new(client: Client, topic: str) -> bool:
    """Whether a producer would make the topic; False if that cannot be told."""
    session = LayoutSession(client, topic, may_create=False)
    try:
        await session.open()
        if session.is_synthetic:  # of a regular topic, which need not be there
            connection = await client.pool.to_any()
            await connection.request(lambda number: requests.partitioned_metadata(number, topic, may_create=False))
    except TopicNotFound:
        return True
    except BraidError:  # who opens the producer meets with it too
        return False
    finally:
        await session.close()
    return False


async def _send_all(
    options: ProduceOptions, producer: Producer, progress: Progress, runtime: Runtime, interrupt: Interrupt
) -> BraidError | None:
    """Send message after message; stop at the first failure and return it, after what was sent is answered."""
    failures: list[BraidError] = []

    def answered(size: int, done: asyncio.Future[Any]) -> None:
        error = done.exception()
        if error is None:
            progress.add(size)
        elif isinstance(error, BraidError) and not failures:
            failures.append(error)

    async def send(number: int, payload: bytes) -> None:
        if options.rate:
            await runtime.clock.sleep(max(0.0, start + number / options.rate - runtime.clock.monotonic()))
        key = None if options.key is None else options.key.replace("{i}", str(number))
        await producer.room()
        sent = producer.send_nowait(payload, key=key)
        sent.add_done_callback(partial(answered, len(payload)))
        if number % options.batch == 0:
            await asyncio.sleep(0)  # let batches out and receipts in

    start = runtime.clock.monotonic()
    number = 0
    try:
        with interrupt.may_cancel():
            async with aclosing(_payloads(options, runtime)) as payloads:
                async for payload in payloads:
                    if failures:
                        break
                    await send(number, payload)
                    number += 1
    except BraidError as error:
        failures.append(error)
    await producer.flush()
    return failures[0] if failures else None


async def _payloads(options: ProduceOptions, runtime: Runtime) -> AsyncGenerator[bytes, None]:
    """What to send, message by message."""
    if options.file is None:
        fixed = options.text.encode() if options.text is not None else _generated(options.size)
        for _number in range(options.messages or 1):
            yield fixed
        return
    left = options.messages
    async with aclosing(_lines(options.file, runtime)) as lines:
        async for line in lines:
            if left == 0:
                return
            yield line
            left = None if left is None else left - 1


async def _lines(path: Path, runtime: Runtime) -> AsyncGenerator[bytes, None]:
    """The lines of a file, or of standard input as they come: the loop goes on while a pipe is silent."""
    worker = runtime.threads.worker("lines")
    is_reading = False
    begun: list[bytes] = []
    try:
        with _opened(path) as stream:
            while True:
                is_reading = True
                chunk = await worker.run(partial(stream.read, READ_BYTES))
                is_reading = False
                for line in _split(begun, chunk or b""):
                    yield line
                if not chunk:
                    return
    except OSError as error:
        is_reading = False
        what = "Standard input" if str(path) == "-" else f"The file {path}"
        raise ConfigError(f"{what} cannot be read: {error.strerror}.") from error
    finally:
        if not is_reading:  # a thread that waits for a silent pipe ends with the process
            await worker.close()


def _opened(path: Path) -> io.FileIO:
    """The file, or standard input for `-`, without a buffer: a read returns what is there."""
    return io.FileIO(0, closefd=False) if str(path) == "-" else io.FileIO(path)


def _split(begun: list[bytes], chunk: bytes) -> Iterator[bytes]:
    """The lines that end in `chunk`; `begun` keeps the pieces of the unfinished one. An empty chunk is the end."""
    *ends, rest = chunk.split(b"\n")
    for end in ends:
        yield (b"".join(begun) + end).removesuffix(b"\r")
        begun.clear()
    if rest:
        begun.append(rest)
    if sum(map(len, begun)) > MAX_LINE_BYTES:
        raise ConfigError(f"A line is longer than {MAX_LINE_BYTES} bytes and cannot be a message; is the file made of lines?")
    if not chunk and begun:
        yield b"".join(begun).removesuffix(b"\r")
        begun.clear()


def _generated(size: int) -> bytes:
    return (FILLER * (size // len(FILLER) + 1))[:size]
