"""The Spark session that measurements share: two threads of this machine, and no web interface."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from bench.broker_process import ROOT, WORK
from bench.floor_source import CORES
from pyspark.sql import SparkSession

from braid_spark import ensure_java, register


@contextmanager
def spark_session() -> Iterator[SparkSession]:
    """A session that ends with the block."""
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PySpark itself
        spark = (
            SparkSession.builder.master(f"local[{CORES}]")
            .appName("braid-bench")
            .config("spark.ui.enabled", "false")
            .config("spark.ui.showConsoleProgress", "false")
            .config("spark.sql.shuffle.partitions", str(CORES))
            .config("spark.driver.host", "127.0.0.1")
            .config("spark.driver.bindAddress", "127.0.0.1")
            .config("spark.driver.memory", "2g")
            .config("spark.local.dir", str(WORK / "spark"))
            .config("spark.sql.warehouse.dir", str(WORK / "spark" / "warehouse"))
            .getOrCreate()
        )
        spark.sparkContext.setLogLevel("OFF")
        register(spark)
    try:
        yield spark
    finally:
        spark.stop()
