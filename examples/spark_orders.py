"""Orders into invoices with Spark, exactly once, while the topic of orders is split.

    braid standalone --data-dir data
    python examples/spark_orders.py pulsar://localhost:6650 http://localhost:8080

Runs a streaming query to the end of what is there, splits the topic, sends more, runs the query again from its checkpoint, and
looks at the output: each order has one invoice, and those of a customer are in order.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from braid.client.blocking import AdminClient, connect
from braid_spark import ensure_java, read_stream, write_stream

ORDERS = "topic://public/default/spark-orders"
INVOICES = "topic://public/default/spark-invoices"


def send(url: str, numbers: range) -> None:
    with connect(url) as client, client.producer(ORDERS) as producer:
        for number in numbers:
            customer = f"customer-{number % 8}"
            order = {"customer": customer, "number": number, "cents": 100 + number}
            producer.send_nowait(json.dumps(order).encode(), key=customer)
        producer.flush()


def invoices(orders: DataFrame) -> DataFrame:
    """One invoice of each order, with its key, so that those of a customer stay together."""
    order = F.from_json(F.col("value").cast("string"), "customer STRING, number INT, cents INT")
    parsed = orders.select("__key", order.alias("order"))
    return parsed.select("__key", F.to_json(F.struct("order.number", "order.cents")).alias("value"))


def run_to_the_end(spark: SparkSession, url: str, checkpoint: Path) -> None:
    orders = read_stream(spark, url, ORDERS, startingOffsets="earliest", subscription="invoices", maxMessagesPerTrigger=100)
    writer = write_stream(invoices(orders), url, INVOICES, checkpoint=str(checkpoint))
    writer.trigger(availableNow=True).start().awaitTermination()


def main(url: str = "pulsar://localhost:6650", admin_url: str = "http://localhost:8080") -> None:
    ensure_java()
    spark = SparkSession.builder.appName("orders").getOrCreate()
    with tempfile.TemporaryDirectory(prefix="braid-orders-") as state, AdminClient(admin_url) as admin:
        admin.scalable_topics.create(ORDERS, segments=1)
        # Orders are kept until the query has read them: what nobody subscribes to goes when its segment is closed.
        admin.scalable_topics.create_subscription(ORDERS, "invoices", kind="queue")
        send(url, range(200))
        run_to_the_end(spark, url, Path(state))
        admin.scalable_topics.split_segment(ORDERS, 0)
        send(url, range(200, 400))
        run_to_the_end(spark, url, Path(state))
    read = spark.read.format("braid").option("service.url", url).option("topic", INVOICES).load()
    rows = read.selectExpr(
        "CAST(__key AS STRING) AS customer", "get_json_object(CAST(value AS STRING), '$.number') AS number", "__index"
    )
    found = [(row.customer, int(row.number)) for row in rows.orderBy("__index").collect()]
    assert sorted(number for _, number in found) == list(range(400))
    by_customer: dict[str, list[int]] = {}
    for customer, number in found:
        by_customer.setdefault(customer, []).append(number)
    assert all(numbers == sorted(numbers) for numbers in by_customer.values())
    print(f"{len(found)} orders became {len(found)} invoices, one each; those of {len(by_customer)} customers are in order")


if __name__ == "__main__":
    main(*sys.argv[1:])
