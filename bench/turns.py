"""The longest turn of a broker's event loop, alone: before and after a change.

    python bench/turns.py [--source FOLDER] [--only NAME ...] [--scale PART]

With `--source` the broker of another checkout is measured: the folder that has its `src`.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.broker_process import ROOT, WORK
from bench.report import show
from bench.scenarios.turns import PARTS, measured

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="The longest turn of a broker's event loop.")
    parser.add_argument("--source", type=Path, default=ROOT, help="a checkout whose broker is measured")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure this; may be repeated")
    parser.add_argument("--scale", type=float, default=1.0, help="of the full counts")
    options = parser.parse_args()
    show(asyncio.run(measured(options.source, tuple(options.only or PARTS), options.scale, lambda _text: None)), "")
    for folder in WORK.glob("turns-*"):
        shutil.rmtree(folder, ignore_errors=True)
