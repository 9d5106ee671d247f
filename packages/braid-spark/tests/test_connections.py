"""Clients of a process: shared, made anew behind a fork, checked options."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest

from braid.errors import ConfigError, ConnectFailed
from braid.testing.broker import BackgroundBroker
from braid_spark import connections
from braid_spark.connections import Link, client_config, shared_link

NOBODY = "pulsar://127.0.0.1:1"


@pytest.fixture(autouse=True)
def none_left() -> Iterator[None]:
    yield
    for link in connections._links.values():
        link.close()
    connections._links.clear()


def test_one_client_for_each_address_and_settings() -> None:
    first = shared_link(NOBODY, {"operation_timeout": "5"})
    assert shared_link(NOBODY, {"operation_timeout": "5"}) is first
    assert shared_link(NOBODY) is not first
    assert shared_link("pulsar://127.0.0.1:2", {"operation_timeout": "5"}) is not first
    assert first.client.config.operation_timeout == 5


def test_a_query_is_patient_unless_told_otherwise() -> None:
    patient = shared_link(NOBODY).client.config
    assert (patient.operation_timeout, patient.send_timeout) == (connections.PATIENCE_SECONDS, connections.PATIENCE_SECONDS)
    more = shared_link(NOBODY, {"operationTimeout": "600"}).client.config
    assert (more.operation_timeout, more.send_timeout) == (600, 600)
    assert shared_link(NOBODY, {"sendTimeout": "5"}).client.config.send_timeout == 5
    with Link(NOBODY) as link:
        assert link.client.config.operation_timeout == client_config(None).operation_timeout


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Python's own, about forks of processes with threads
@pytest.mark.skipif(not hasattr(os, "fork"), reason="Spark forks its workers only where there is fork")
def test_a_forked_worker_does_not_use_its_parents_client() -> None:
    with BackgroundBroker(with_http=False) as broker:
        link = shared_link(broker.service_url)
        assert link.run(lambda: link.client.partitions("orders")) == 0
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                mine = shared_link(broker.service_url)
                status = 0 if mine is not link and mine.run(lambda: mine.client.partitions("orders")) == 0 else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert shared_link(broker.service_url) is link
        assert link.run(lambda: link.client.partitions("orders")) == 0


def test_nobody_at_the_address_is_told_at_once() -> None:
    with Link(NOBODY, {"operation_timeout": "600"}) as link, pytest.raises(ConnectFailed):
        link.connect()


@pytest.mark.parametrize("name", ["operationTimeout", "operationtimeout", "operation_timeout", "OPERATION_TIMEOUT"])
def test_options_of_the_client_in_any_spelling(name: str) -> None:
    assert client_config({name: "7.5"}).operation_timeout == 7.5


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"operationTimeot": "1"}, r"no option braid.client.operationTimeot. Did you mean braid.client.operation_timeout\?"),
        ({"zzz": "1"}, "Known: .*operation_timeout"),
        ({"operationTimeout": "soon"}, "braid.client.operation_timeout cannot be 'soon'"),
        ({"operationTimeout": "-1"}, "braid.client.operation_timeout cannot be '-1'"),
    ],
)
def test_wrong_options_of_the_client(settings: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        client_config(settings)
