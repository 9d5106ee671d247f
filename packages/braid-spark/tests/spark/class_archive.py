"""Makes the archive of classes that `quick_start` speaks of: queries run once in a JVM that writes down what it loaded.

Both ways to run Spark are taken: threads of the JVM, as in most tests, and a cluster, whose master and worker are in this JVM
here. A Java that cannot write an archive leaves an empty file, which nobody uses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from order_driver import SETTINGS as STATEFUL
from order_driver import Queries
from pyspark.sql import SparkSession
from quick_start import ARCHIVE, BARE_OPTIONS, SETTINGS

from braid.client import blocking
from braid.testing.broker import BackgroundBroker
from braid_spark import ensure_java, register

TOPIC = "topic://public/default"
EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"
"""What executors of a cluster begin with; they are JVMs of their own."""
END_SECONDS = 180


def session(master: str, folder: Path, archive: Path) -> SparkSession:
    builder = SparkSession.builder.master(master).appName("classes")
    settings = {
        **SETTINGS,
        **STATEFUL,
        "spark.driver.extraJavaOptions": f"{BARE_OPTIONS} -XX:ArchiveClassesAtExit={archive}",
        "spark.executor.memory": "512m",
        "spark.local.dir": str(folder / "local"),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    made = builder.getOrCreate()
    made.sparkContext.setLogLevel("OFF")
    return made


def work(spark: SparkSession, broker: BackgroundBroker, folder: Path) -> None:
    """Read, write, and keep state, in batches and in streams."""
    register(spark)
    source = f"{TOPIC}/classes"
    with blocking.connect(broker.service_url) as client, client.producer(source) as producer:
        producer.send(b"1", key="a")
    given = {"service.url": broker.service_url, "topic": source}
    rows = spark.read.format("braid").options(**given).load()
    rows.select("value", "__key").write.format("braid").options(**given).mode("append").save()
    rows.count()
    options = argparse.Namespace(url=broker.service_url, input=source, output=f"{source}-out", folder=folder, rows=100)
    queries = Queries(spark, options, "none")
    for query in (queries.stateful(availableNow=True), queries.narrow(availableNow=True)):
        query.awaitTermination()


def main() -> None:
    ensure_java()
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    with tempfile.TemporaryDirectory(prefix="braid-classes-") as made:
        folder = Path(made)
        archive = folder / ARCHIVE.name
        spark = session("local[2]", folder, archive)
        java: subprocess.Popen[Any] = spark.sparkContext._gateway.proc  # type: ignore[union-attr]
        with BackgroundBroker() as broker:
            work(spark, broker, folder)
        spark.stop()
        spark = session("local-cluster[1,1,512]", folder, archive)
        spark.range(10).selectExpr("sum(id)").collect()
        jvm: Any = spark._jvm
        for name in (EXECUTOR, f"{EXECUTOR}$"):
            jvm.java.lang.Class.forName(name)
        spark.stop()
        assert java.stdin is not None
        java.stdin.close()  # it ends, and writes
        java.wait(END_SECONDS)
        ARCHIVE.unlink(missing_ok=True)
        ARCHIVE.write_bytes(archive.read_bytes() if archive.exists() else b"")


if __name__ == "__main__":
    main()
