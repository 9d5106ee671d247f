"""One Spark session and one broker for all tests with Spark: starting either for each would take most of the time.

Topics are a test's own (`topic`), so that tests do not meet. Spark writes what it must to a temporary directory.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
from fork_server import ForkServer
from pyspark.sql import SparkSession
from quick_start import BARE_OPTIONS, JAVA_OPTIONS, SETTINGS

from braid.client import blocking
from braid.testing.broker import BackgroundBroker
from braid_spark import ensure_java, register

TIMEOUT_SECONDS = 300
"""For one test; the first one waits for the JVM."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_SECONDS))


@pytest.fixture(scope="session")
def fork_server() -> Iterator[ForkServer]:
    """Of Spark's Python processes."""
    with ForkServer() as server:
        yield server


@pytest.fixture(scope="session")
def spark(fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """A session on two threads of this machine."""
    ensure_java()
    os.environ["PYSPARK_PYTHON"] = os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    os.environ["SPARK_LAUNCHER_OPTS"] = BARE_OPTIONS
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))  # of `sitecustomize`
    os.environ.update(fork_server.environment)
    where = tmp_path_factory.mktemp("spark")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PySpark itself
        builder = SparkSession.builder.master("local[2]").appName("braid-tests")
        for name, value in SETTINGS.items():
            builder = builder.config(name, value)
        session = (
            builder.config("spark.driver.memory", "1g")
            .config("spark.driver.extraJavaOptions", JAVA_OPTIONS)
            .config("spark.sql.warehouse.dir", str(where / "warehouse"))
            .config("spark.local.dir", str(where / "local"))
            .config("spark.sql.session.timeZone", "UTC")
            .getOrCreate()
        )
        session.sparkContext.setLogLevel("OFF")
        register(session)
    try:
        yield session
    finally:
        for query in session.streams.active:
            query.stop()
        session.stop()


@pytest.fixture(scope="session")
def broker() -> Iterator[BackgroundBroker]:
    """A broker in memory on the machine's clock."""
    with BackgroundBroker() as started:
        yield started


@pytest.fixture(scope="session")
def client(broker: BackgroundBroker) -> Iterator[blocking.Client]:
    """The SDK, connected to that broker."""
    with blocking.connect(broker.service_url) as connected:
        yield connected


@pytest.fixture(scope="session")
def admin(broker: BackgroundBroker) -> Iterator[blocking.AdminClient]:
    """Administration of that broker."""
    with blocking.AdminClient(broker.http_url) as opened:
        yield opened


@pytest.fixture
def send(client: blocking.Client) -> Callable[[str, Iterable[tuple[str | None, str]]], None]:
    """Publishes pairs of key and value to a topic and waits until all are stored."""

    def publish(topic: str, pairs: Iterable[tuple[str | None, str]]) -> None:
        with client.producer(topic) as producer:
            for sent in [producer.send_nowait(value.encode(), key=key) for key, value in pairs]:
                sent.result()

    return publish


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """Makes names of topics that belong to this test: `topic("topic")`, `topic("persistent", "other")`."""
    test = "".join(letter if letter.isalnum() else "-" for letter in request.node.name)

    def name(domain: str = "topic", part: str = "t") -> str:
        return f"{domain}://public/default/{test}-{part}"

    return name
