"""The query of a fault run: numbers in, a function of each out. Started again by the run whenever it dies.

Runs until the file `--stop` exists, then to the end of the input. Exit code 0: done; 3: the query failed, its reason on
standard error.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from fault_points import FaultySource, reach
from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from quick_start import JAVA_OPTIONS, SETTINGS


def session(arguments: argparse.Namespace, other: dict[str, str] | None = None) -> SparkSession:
    """On the cluster `arguments.master`; `other` settings go before those of a fault run."""
    builder = SparkSession.builder.master(arguments.master).appName("braid-faults")
    settings = {
        **SETTINGS,
        "spark.driver.extraJavaOptions": JAVA_OPTIONS,
        "spark.executor.extraJavaOptions": JAVA_OPTIONS,
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.executor.cores": "2",
        "spark.task.maxFailures": "20",
        "spark.stage.maxConsecutiveAttempts": "20",
        # An attempt that is slow is soon copied to the other worker.
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.quantile": "0.5",
        "spark.speculation.multiplier": "1.2",
        "spark.speculation.minTaskRuntime": "500ms",
        "spark.locality.wait": "0s",
        "spark.excludeOnFailure.enabled": "false",
        "spark.local.dir": arguments.scratch,
        "spark.sql.warehouse.dir": f"{arguments.scratch}/warehouse",
        **(other or {}),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("WARN")
    return made


def numbers(spark: SparkSession, arguments: argparse.Namespace) -> DataFrame:
    """The input: one column `value` of decimal numbers."""
    if arguments.source == "files":
        # Two small files are two partitions.
        return spark.readStream.format("text").option("maxFilesPerTrigger", 2).load(arguments.input)
    return (
        spark.readStream.format("braid")
        .option("service.url", arguments.url)
        .option("topic", arguments.input)
        .option("startingOffsets", "earliest")
        .option("maxMessagesPerTrigger", arguments.rows)
        .option("braid.client.operation_timeout", "60")
        .load()
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("master", "url", "source", "input", "output", "checkpoint", "scratch", "stop", "semantics", "publish"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--rows", type=int, required=True)
    arguments = parser.parse_args()
    spark = session(arguments)
    spark.dataSource.register(FaultySource)
    if arguments.source == "braid":
        from braid_spark import register

        register(spark)
    jvm = spark._jvm
    assert jvm is not None
    reach("driver up", driver=jvm.java.lang.ProcessHandle.current().pid())
    results = (
        numbers(spark, arguments)
        .selectExpr("CAST(CAST(value AS STRING) AS BIGINT) % 50 AS bucket", "CAST(CAST(value AS STRING) AS BIGINT) AS number")
        .selectExpr("CAST(bucket AS STRING) AS __key", "concat(number, ':', number * 7 + 3) AS value")
    )
    query = (
        results.writeStream.format("braid-faults")
        .option("service.url", arguments.url)
        .option("topic", arguments.output)
        .option("semantics", arguments.semantics)
        .option("publish", arguments.publish)
        .option("transactionTimeout", "2m")
        .option("checkpointLocation", arguments.checkpoint)
        .option("braid.client.operation_timeout", "60")
        .start()
    )
    try:
        while query.isActive:  # it never ends by itself
            time.sleep(0.1)
            if Path(arguments.stop).exists():
                query.processAllAvailable()
                query.stop()
                return 0
        query.awaitTermination()  # raises what made it fail
    except StreamingQueryException as error:
        sys.stderr.write(f"QUERY FAILED: {error}\n")
    return 3


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    sys.exit(code)
