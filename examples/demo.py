"""The demonstration behind `make demo`: three acts on one broker, each with a verified result.

1. A durable broker: real Pulsar clients, a kill -9 in the middle, nothing lost.
2. A scalable topic: split and merged while producers and consumers use it, every key in order.
3. A Spark pipeline on a topic that splits and merges, killed on the way: every order once in its output.

The exit code says whether all held. With `SABOTAGE=1` the pipeline drops one order, which must be noticed.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import demo_durable, demo_pipeline, demo_scalable
from examples.demo_broker import Broker

FAREWELL = """
Look around yourself:
  .venv/bin/braid standalone --data-dir data
  .venv/bin/braid scalable-topics create topic://public/default/orders --segments 2
  .venv/bin/braid scalable-topics split-segment topic://public/default/orders 0
  .venv/bin/braid scalable-topics dag topic://public/default/orders
  .venv/bin/python examples/stream.py
  .venv/bin/braid pipeline check examples/revenue.yaml
  .venv/bin/braid pipeline run examples/revenue.yaml --dashboard query.svg
  .venv/bin/braid sinks list
  .venv/bin/braid consume persistent://public/default/revenue --subscription me --from earliest"""


def main() -> int:
    is_sabotaged = os.environ.get("SABOTAGE", "") not in ("", "0")
    work_dir = Path(tempfile.mkdtemp(prefix="braid-demo-"))
    is_durable = is_scalable = is_exact = False
    try:
        broker = Broker(work_dir / "data")
        try:
            print("\n1. A durable broker under real Pulsar clients")
            is_durable = demo_durable.run(broker)
            print("\n2. A topic that is split and merged while in use")
            is_scalable = demo_scalable.run(broker)
            print("\n3. A Spark pipeline, exactly once" + (", with one order dropped on purpose" if is_sabotaged else ""))
            is_exact = demo_pipeline.run(broker, work_dir, is_sabotaged=is_sabotaged)
        finally:
            code = broker.stop()
    finally:
        shutil.rmtree(work_dir, ignore_errors=True)
    if code != 0:
        print(f"FAILED: the broker ended with exit code {code}.")
    print(FAREWELL)
    return 0 if is_durable and is_scalable and is_exact and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
