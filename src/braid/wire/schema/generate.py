"""Regenerates `pulsar_pb2.py` and `pulsar_pb2.pyi` from `pulsar.proto`: `python -m braid.wire.schema.generate`.

A development tool: needs grpcio-tools, is never imported by the product. Both outputs are committed.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> int:
    """Run protoc so that the generated module imports as `braid.wire.schema.pulsar_pb2`."""
    from grpc_tools import protoc

    source_root = Path(__file__).resolve().parents[3]
    return int(
        protoc.main(
            [
                "protoc",
                f"--proto_path={source_root}",
                f"--python_out={source_root}",
                f"--pyi_out={source_root}",
                "braid/wire/schema/pulsar.proto",
            ]
        )
    )


if __name__ == "__main__":
    sys.exit(main())
