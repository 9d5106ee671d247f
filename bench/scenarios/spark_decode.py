"""Decoding without Spark: entries of a fetch into Arrow batches, beside the SDK that reads the same messages one by one.

One process, no broker. Entries hold what the SDK puts into one (1,000 messages or 128 kB), or one message each, as clients that
do not batch send them; values are random. The split says how much of the time goes into opening the entries, into finding the
messages of batches, into reading their metadata and into building columns.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pyarrow as pa
from bench.report import Figure
from bench.scenarios.bench_run import Run

from braid.client.messages import MessageId, messages_of
from braid.client.segment_reads import Fetched
from braid.wire import messages as pb
from braid.wire.batch import encode_batch
from braid.wire.compression import decompress
from braid.wire.entries import build_entry, entry_metadata, payload_offset
from braid_spark import decode
from braid_spark.columns import Columns, default_schema
from braid_spark.decode import SegmentDecoder
from braid_spark.rows import Rows

GROUP = "Spark source without Spark: decoding, one core"
FETCH_BYTES = 4 << 20
ENTRY_BYTES, ENTRY_MESSAGES = 128 << 10, 1000
ROUNDS = 9
TOPIC = "topic://public/default/decoded"
TARGETS = {
    ("equal sizes", 100): 1.5e6,
    ("varying sizes", 100): 0.8e6,
    ("unbatched", 100): 1e6 / 3,
    ("unbatched", 1000): 1e6 / 3,
}
"""At least so many rows a second, with all columns."""


def measure(run: Run) -> None:
    everything = default_schema()
    schemas = {"value and key": pa.schema([everything.field("value"), everything.field("__key")]), "all columns": everything}
    for size in (100, 1000):
        for kind in ("equal sizes", "varying sizes", "unbatched"):
            fetched = _fetched(size, kind)
            count = fetched.last_index[-1] + 1
            one_by_one = _seconds(partial(_by_the_sdk, fetched), 3)
            for name, schema in schemas.items():
                run.progress(f"decode: {size} B, {kind}, {name}")
                columns = Columns.of(schema)
                seconds = _seconds(partial(_by_the_decoder, columns, fetched), ROUNDS)
                run.add([_figure(f"{size} B, {kind}, {name}", size, count, seconds, one_by_one, columns, fetched)])
                target = TARGETS.get((kind, size))
                if target is not None and name == "all columns":
                    run.add([_share(f"{size} B, {kind}, time to the most allowed", count, seconds, target)])


def _fetched(size: int, kind: str) -> Fetched:
    """One answer of a broker."""
    is_varying, is_unbatched = kind != "equal sizes", kind == "unbatched"
    chance = random.Random(size)
    entries: list[bytes] = []
    last: list[int] = []
    count, held = 0, 0
    while held < FETCH_BYTES:
        messages: list[tuple[pb.SingleMessageMetadata, bytes]] = []
        room = ENTRY_BYTES
        while room > 0 and len(messages) < (1 if is_unbatched else ENTRY_MESSAGES):
            value = chance.randbytes(chance.randint(size // 2, size * 3 // 2) if is_varying else size)
            key = f"user-{chance.randrange(1000)}" if is_varying else f"user-{chance.randrange(1000):03}"
            messages.append((pb.SingleMessageMetadata(partition_key=key, sequence_id=20_000 + count), value))
            room -= len(value) + len(key)
            count += 1
        metadata = pb.MessageMetadata(producer_name="bench", sequence_id=count, publish_time=1_700_000_000_000)
        if is_unbatched:
            metadata.partition_key = messages[0][0].partition_key
        else:
            metadata.num_messages_in_batch = len(messages)
        entries.append(build_entry(metadata, messages[0][1] if is_unbatched else encode_batch(messages)))
        held += len(entries[-1])
        last.append(count - 1)
    number = len(entries)
    data = memoryview(b"".join(entries))
    return Fetched(count, last, [1] * number, list(range(number)), [0] * number, [len(each) for each in entries], data)


def _by_the_decoder(columns: Columns, fetched: Fetched) -> None:
    for _batch in SegmentDecoder(columns, topic=TOPIC, segment=0, start=0, stop=fetched.covered_to).decode(fetched):
        pass


def _by_the_sdk(fetched: Fetched) -> None:
    at = 0
    for number, size in enumerate(fetched.size):
        entry = bytes(fetched.data[at : at + size])
        metadata = entry_metadata(entry)
        payload = decompress(metadata.compression, entry[payload_offset(entry) :], metadata.uncompressed_size, FETCH_BYTES)
        messages_of(TOPIC, MessageId(1, number), metadata, payload, 0, [])
        at += size


def _seconds(work: Callable[[], None], rounds: int) -> list[float]:
    """CPU seconds of each round; the first one warms up and does not count."""
    found = []
    for _round in range(rounds + 1):
        started = time.process_time()
        work()
        found.append(time.process_time() - started)
    return found[1:]


def _figure(
    name: str, size: int, count: int, seconds: list[float], one_by_one: list[float], columns: Columns, fetched: Fetched
) -> Figure:
    rates = [count / each for each in seconds]
    middle = statistics.median(rates)
    times_as_fast = statistics.median(one_by_one) / statistics.median(seconds)
    split = ", ".join(f"{part} {share:.0%}" for part, share in _split(columns, fetched))
    return Figure(
        group=GROUP,
        name=name,
        value=middle,
        unit="rows/s",
        low=min(rates),
        high=max(rates),
        note=f"{middle * size / 1e6:,.0f} MB/s; {times_as_fast:.1f} times the SDK's rate; {split}",
    )


def _share(name: str, count: int, seconds: list[float], target: float) -> Figure:
    # Lower is better for figures with a target.
    shares = [each * target / count for each in seconds]
    return Figure(
        group=GROUP, name=name, value=statistics.median(shares), unit="x", low=min(shares), high=max(shares), target=1.0
    )


def _split(columns: Columns, fetched: Fetched) -> Iterator[tuple[str, float]]:
    """The parts of decoding and their shares."""
    spent = {"entries": 0.0, "find": 0.0, "metadata": 0.0, "columns": 0.0}
    places: list[tuple[Any, str, str]] = [
        (decode, "read_entries", "entries"),
        (decode, "find_starts", "find"),
        (decode, "read_messages", "metadata"),
        (Rows, "record_batch", "columns"),
    ]
    before = [getattr(where, function) for where, function, _ in places]
    for (where, function, part), original in zip(places, before, strict=True):
        setattr(where, function, _timed(spent, part, original))
    try:
        whole = sum(_seconds(partial(_by_the_decoder, columns, fetched), 5))
    finally:
        for (where, function, _), original in zip(places, before, strict=True):
            setattr(where, function, original)
    for part, seconds in spent.items():
        yield part, seconds * 5 / 6 / whole


def _timed(spent: dict[str, float], name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def timed(*args: Any, **options: Any) -> Any:
        started = time.process_time()
        try:
            return function(*args, **options)
        finally:
            spent[name] += time.process_time() - started

    return timed
