"""The demonstration behind `make demo`: two acts on one broker, each with a verified result.

1. A durable broker: real Pulsar clients, a kill -9 in the middle, nothing lost.
2. A scalable topic: split and merged while producers and consumers use it, every key in order.

The exit code says whether both held.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from examples import demo_durable, demo_scalable
from examples.demo_broker import Broker

FAREWELL = """
Look around yourself:
  .venv/bin/braid standalone --data-dir data
  .venv/bin/braid scalable-topics create topic://public/default/orders --segments 2
  .venv/bin/braid scalable-topics split-segment topic://public/default/orders 0
  .venv/bin/braid scalable-topics dag topic://public/default/orders
  .venv/bin/python examples/stream.py"""


def main() -> int:
    data_dir = Path(tempfile.mkdtemp(prefix="braid-demo-"))
    try:
        broker = Broker(data_dir)
        try:
            print("\n1. A durable broker under real Pulsar clients")
            is_durable = demo_durable.run(broker)
            print("\n2. A topic that is split and merged while in use")
            is_scalable = demo_scalable.run(broker)
        finally:
            code = broker.stop()
    finally:
        shutil.rmtree(data_dir, ignore_errors=True)
    if code != 0:
        print(f"FAILED: the broker ended with exit code {code}.")
    print(FAREWELL)
    return 0 if is_durable and is_scalable and code == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
