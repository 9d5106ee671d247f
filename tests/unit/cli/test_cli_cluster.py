"""The admin client and the commands on three brokers: redirects, moved bundles, a drained broker, `braid top` over all."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from braid.cli import main as cli
from braid.client.blocking import AdminClient
from braid.errors import BraidError
from braid.testing.broker import BackgroundBroker

TOPICS = [f"spread-{number}" for number in range(12)]


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker(brokers=3) as running:
        yield running


@pytest.fixture(scope="module")
def admin(broker: BackgroundBroker) -> Iterator[AdminClient]:
    """A client that asks broker 0 first; the topics exist."""
    with AdminClient(broker.http_url) as client:
        for topic in TOPICS:
            client.topics.create(topic)
            client.subscriptions.create(topic, "s")
        yield client


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], broker: BackgroundBroker, admin: AdminClient
) -> Run:
    monkeypatch.setenv("BRAID_ADMIN_URL", broker.http_url)

    def braid_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["braid", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        seen = capfdbinary.readouterr()
        return int(ended.value.code or 0), seen.out.decode(), seen.err.decode()

    return braid_command


def owner(admin: AdminClient, topic: str) -> str:
    return str(admin.topics.stats(topic).owner_broker)


def test_any_broker_answers_for_topics_that_others_own(admin: AdminClient) -> None:
    brokers = admin.brokers.list()
    assert len(brokers) == 3
    owners = {topic: owner(admin, topic) for topic in TOPICS}
    assert len(set(owners.values())) > 1
    for name in brokers:
        with AdminClient(f"http://{name}") as other:
            assert {topic: owner(other, topic) for topic in TOPICS} == owners
            assert {topic: other.topics.lookup(topic).broker_id for topic in TOPICS} == owners
            assert other.brokers.leader() == admin.brokers.leader()
            assert other.brokers.health(broker=brokers[0]) == "ok"


def test_a_bundle_goes_where_it_is_sent(run: Run, admin: AdminClient) -> None:
    bundle, before = admin.topics.bundle(TOPICS[0]), owner(admin, TOPICS[0])
    target = next(name for name in admin.brokers.list() if name != before)
    code, out, _err = run("bundles", "transfer", "public/default", bundle, target)
    assert (code, out) == (0, f"done: bundles transfer (namespace public/default, bundle {bundle}, broker {target})\n")
    assert owner(admin, TOPICS[0]) == target
    assert f"public/default/{bundle}" in admin.brokers.owned(target)
    assert f"public/default/{bundle}" not in admin.brokers.owned(before)


def test_a_drained_broker_has_nothing_and_takes_nothing(run: Run, admin: AdminClient) -> None:
    drained = owner(admin, TOPICS[0])
    code, out, err = run("brokers", "drain", drained)
    assert (code, out, err) == (0, f"done: brokers drain (broker {drained})\n", "")
    assert admin.brokers.owned(drained) == {}
    assert drained not in {owner(admin, topic) for topic in TOPICS}
    assert run("brokers", "undrain", drained)[0] == 0
    bundle = admin.topics.bundle(TOPICS[0])
    admin.bundles.transfer("public/default", bundle, drained)
    assert owner(admin, TOPICS[0]) == drained


def test_top_shows_all_brokers_and_all_topics(run: Run, admin: AdminClient) -> None:
    owners = {f"persistent://public/default/{topic}": owner(admin, topic) for topic in TOPICS}
    code, out, err = run("top", "--once", "--interval", "0.1", "--output", "json", "--rows", "100")
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert [row["broker"] for row in found["brokers"]] == sorted(admin.brokers.list())
    assert {row["state"] for row in found["brokers"]} == {"up"}
    assert sum(row["isLeader"] for row in found["brokers"]) == 1
    shown = {row["topic"]: row["owner"] for row in found["topics"] if row["topic"] in owners}
    assert shown == owners


def test_many_topics_are_deleted_wherever_they_are(run: Run, admin: AdminClient) -> None:
    assert run("topics", "delete", *TOPICS, "--yes")[0] == 0
    assert admin.topics.list() == []
    with pytest.raises(BraidError):
        admin.topics.stats(TOPICS[0])


def test_a_dead_broker_stops_nobody(run: Run, broker: BackgroundBroker, admin: AdminClient) -> None:
    """Runs last: one broker is gone afterwards."""
    urls = [node.http_url for node in broker.broker.nodes]
    broker.run(broker.broker.kill(2))
    assert run("clusters", "list", "--url", ",".join(reversed(urls)))[:2] == (0, "standalone\n")
    code, out, _err = run("top", "--once", "--interval", "0.1", "--output", "json")
    states = {row["broker"]: row["state"] for row in json.loads(out)["brokers"]}
    dead = urls[2].removeprefix("http://")
    assert code == 0
    assert [name for name, state in states.items() if state == "up"] == sorted(url.removeprefix("http://") for url in urls[:2])
    assert states[dead].startswith(f"no answer: No broker answers at {urls[2]} (connection refused)")
