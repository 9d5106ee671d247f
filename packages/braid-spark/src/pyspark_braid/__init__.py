"""Found by PySpark on its own, as every top-level module `pyspark_*` is: the format `braid` needs no registration.

Must import cheaply and never fail: one such module that does makes PySpark forget all of them.
"""

from __future__ import annotations

from braid_spark.source import BraidDataSource as DefaultSource

__all__ = ["DefaultSource"]
