"""What Spark's Python processes import: each of them pays for it, at every start."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

READING = """
from braid_spark.columns import Columns, default_schema
from braid_spark.decode import SegmentDecoder
from made_fetches import Made, alone, batch, fetched

made = [Made(value=b"v" * at, key=f"k{at % 7}", properties=(("a", "b"),), event_ms=at, sequence_id=at) for at in range(1, 60)]
entries = [batch(made), alone(made[0], number=1)]
decoder = SegmentDecoder(Columns.of(default_schema()), topic="t", segment=0, start=3, stop=1000)
assert sum(found.num_rows for found in decoder.decode(fetched(entries, 0))) == 57
"""
WRITING = """
import numpy as np
import pyarrow as pa
from braid.model.routing import Routing
from braid_spark.blocks import ArrowBlock

ends = pa.py_buffer(np.arange(0, 36, 5, dtype=np.int32))
values = pa.Array.from_buffers(pa.binary(), 7, [None, ends, pa.py_buffer(b"value" * 7)], 0)
texts = pa.Array.from_buffers(pa.string(), 7, [pa.py_buffer(b"\\x6f"), ends, pa.py_buffer(b"abcde" * 7)])
times = pa.Array.from_buffers(pa.timestamp("us", "UTC"), 7, [pa.py_buffer(b"\\x6f"), pa.py_buffer(np.arange(7) * 1000)])
block = ArrowBlock.of(values, keys=texts, event_times=times)
assert block.count == 7
assert sum(part.count for _, part in block.spread(Routing.HIGH16, [0, 0x8000])) == 7
"""
PLANNING = """
import braid_spark.reader
import braid_spark.stream_reader
"""


def imported(work: str) -> set[str]:
    """The modules of a process that does this."""
    text = f"import sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n{work}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_tasks_import_no_pandas() -> None:
    for work in (READING, WRITING):
        assert "pandas" not in imported(work)


def test_readers_import_no_producers_and_consumers() -> None:
    found = {name for name in imported(PLANNING) if name.startswith("braid.client.")}
    assert "braid.client.segment_reads" in found
    unwanted = {
        "producer",
        "lanes",
        "consumer",
        "queue_consumer",
        "stream_consumer",
        "checkpoint_consumer",
        "transactions",
        "admin",
    }
    assert not found & {f"braid.client.{name}" for name in unwanted}
