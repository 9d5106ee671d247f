"""`braid scalable-topics` as users of pulsar-admin write it, and what the commands say of what they did."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator

import pytest

from braid.cli import main as cli
from braid.client import connect
from braid.client.blocking import AdminClient
from braid.errors import NotAllowed
from braid.testing.broker import BackgroundBroker
from braid.testing.raw_client import RawClient

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture(scope="module")
def admin(broker: BackgroundBroker) -> Iterator[AdminClient]:
    with AdminClient(broker.http_url) as client:
        yield client


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], broker: BackgroundBroker) -> Run:
    monkeypatch.setenv("BRAID_ADMIN_URL", broker.http_url)
    monkeypatch.setenv("BRAID_URL", broker.service_url)

    def braid_command(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["braid", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        seen = capfdbinary.readouterr()
        assert b"Traceback" not in seen.err
        return int(ended.value.code or 0), seen.out.decode(), " ".join(seen.err.decode().split())

    return braid_command


@pytest.fixture
def topic(admin: AdminClient, request: pytest.FixtureRequest) -> str:
    """A topic of two segments with a subscription `sub`."""
    name = f"t-{abs(hash(request.node.name))}"
    admin.scalable_topics.create(name, segments=2)
    admin.scalable_topics.create_subscription(name, "sub")
    return name


def worked(outcome: tuple[int, str, str]) -> str:
    code, out, err = outcome
    assert (code, err) == (0, ""), err
    return out


@pytest.mark.parametrize(
    ("arguments", "properties"),
    [
        (("NAME", "-s", "2", "-p", "a=1", "-p", "b=2"), {"a": "1", "b": "2"}),
        (("-p", "a=1,b=2", "--initial-segments", "2", "NAME"), {"a": "1", "b": "2"}),
        (("--property", "a=1,b=2", "NAME", "--segments=2"), {"a": "1", "b": "2"}),
        (("-p", "a=1", "NAME", "-s2", "--segments", "2"), {"a": "1"}),
        (("NAME", "-s", "2", "-p", "a=1,2 and 3,b=x"), {"a": "1,2 and 3", "b": "x"}),
    ],
)
def test_creation(run: Run, admin: AdminClient, arguments: tuple[str, ...], properties: dict[str, str]) -> None:
    name = f"c-{abs(hash(arguments))}"
    worked(run("scalable-topics", "create", *(name if each == "NAME" else each for each in arguments)))
    found = admin.scalable_topics.get_metadata(name)
    assert (len(found.segments), found.properties) == (2, properties)
    key = next(iter(properties))
    assert name in worked(run("scalable-topics", "list", "public/default", "-p", f"{key}={properties[key]}"))
    assert name not in run("scalable-topics", "list", "-p", f"{key}=other", "public/default")[1]


def test_layouts_are_changed_and_what_came_of_it_is_told(run: Run, topic: str) -> None:
    said = worked(run("scalable-topics", "split-segment", topic, "-s", "0"))
    assert said == f"done: scalable-topics split-segment (topic {topic}, segment 0, into 2 [0000-3fff], 3 [4000-7fff])\n"
    code, out, _err = run("scalable-topics", "split-segment", "--segment-id", "1", topic, "--output", "json")
    assert code == 0
    told = json.loads(out)
    assert (told["done"], told["topic"], told["segment"]) == ("scalable-topics split-segment", topic, 1)
    assert [(each["segmentId"], each["hashRange"]["start"]) for each in told["into"]] == [(4, 0x8000), (5, 0xC000)]
    said = worked(run("scalable-topics", "merge-segments", topic, "--segment-id-1", "2", "--segment-id-2", "3"))
    assert said == f"done: scalable-topics merge-segments (topic {topic}, segment 2, other 3, into 6 [0000-7fff])\n"
    assert "into 7 [8000-ffff]" in worked(run("scalable-topics", "merge-segments", topic, "4", "--segment-id-2", "5"))


def test_subscriptions(run: Run, admin: AdminClient, topic: str) -> None:
    worked(run("scalable-topics", "create-subscription", topic, "-s", "work", "-t", "QUEUE"))
    assert admin.scalable_topics.get_stats(topic).subscriptions["work"].type == "QUEUE"
    worked(run("scalable-topics", "seek", topic, "-s", "sub", "-t", "1h", "-f"))
    worked(run("scalable-topics", "seek", "--subscription", "sub", "--time", "earliest", topic, "--force"))
    worked(run("scalable-topics", "seek", topic, "sub", "--time", "90m", "-y"))
    worked(run("scalable-topics", "clear-backlog", topic, "-s", "sub", "-f"))
    code, _out, err = run("scalable-topics", "clear-backlog", topic, "-s", "sub")
    assert code == 2 and f"{topic} sub: this cannot be undone; add --yes" in err
    worked(run("scalable-topics", "delete-subscription", topic, "-s", "work", "-f"))
    assert list(admin.scalable_topics.get_stats(topic).subscriptions) == ["sub"]
    worked(run("scalable-topics", "delete", "-f", topic, "-y"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("create", "x", "--segments", "2", "-s", "3"), "The segments is given as 2 and 3"),
        (("create", "x", "-s", "2", "-s", "3"), "The segments is given as 2 and 3"),
        (("split-segment", "x", "1", "-s", "0"), "The segment is given as 1 and 0, in its place and by -s/--segment-id"),
        (("merge-segments", "x", "1", "2", "--segment-id-2", "3"), "The other is given as 2 and 3"),
        (("seek", "x", "a", "1h", "-s", "b", "-f"), "The subscription is given as 'a' and 'b'"),
        (("seek", "x", "a", "1h", "-t", "2h", "-f"), "The to is given as '1h' and '2h'"),
        (("create-subscription", "x", "a", "--kind", "queue", "-t", "STREAM"), "The kind is given as 'queue' and 'STREAM'"),
        (("create", "x", "-p", "a=1,a=2"), "'a' is given twice"),
        (("split-segment", "x"), "Missing argument 'segment'; give it in its place or by -s/--segment-id"),
        (("seek", "x", "-t", "1h", "-f"), "Missing argument 'subscription'"),
        (("seek", "x", "-s", "a", "-f"), "Missing argument 'to'"),
        (("clear-backlog", "x", "-f"), "Missing argument 'subscription'"),
        (("seek", "x", "a", "latest", "-f"), "For the end of a scalable topic use clear-backlog"),
        (("seek", "x", "a", "3:4", "-f"), "'3:4' is no time; write earliest, an age such as 90m"),
        (("create-subscription", "x", "a", "--at", "3:4"), "'3:4' is no end of a topic; write earliest or latest"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_anything_is_done(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run("scalable-topics", *arguments)
    assert (code, out) == (2, "")
    assert words in err and "MessageId(" not in err


def test_the_same_in_two_spellings_is_no_contradiction(run: Run, topic: str) -> None:
    worked(run("scalable-topics", "create-subscription", topic, "two", "-s", "two", "--kind", "queue", "-t", "QUEUE"))
    worked(run("scalable-topics", "split-segment", topic, "1", "-s", "1"))


def test_the_options_are_in_the_help(run: Run) -> None:
    out = " ".join(run("scalable-topics", "seek", "--help")[1].split())
    assert "-s, --subscription" in out and "-t, --time" in out and "-f, --yes, --force" in out
    out = " ".join(run("scalable-topics", "create", "--help")[1].split())
    assert "--initial-segments" in out and "[default: (1)]" in out


def test_commands_for_regular_topics_point_to_those_for_scalable_ones(run: Run, topic: str) -> None:
    for arguments in (
        ("topics", "stats", topic),
        ("topics", "delete", topic, "-y"),
        ("topics", "unload", f"persistent://public/default/{topic}"),
        ("subscriptions", "list", topic),
    ):
        code, _out, err = run(*arguments)
        assert code == 1 and "is a scalable topic: use `braid scalable-topics`" in err, err
        assert "braid topics list" not in err


def test_a_short_name_is_the_same_topic_for_both_ends(
    run: Run, broker: BackgroundBroker, admin: AdminClient, topic: str
) -> None:
    full = f"persistent://public/default/{topic}"
    for name in (topic, full):
        assert run("produce", name, "-n", "5", "-m", "hello", "--url", broker.service_url)[0] == 0
        reading = ("consume", name, "-s", "sub", "--from", "earliest", "-n", "5", "--timeout", "20")
        code, out, err = run(*reading, "--url", broker.service_url)
        assert (code, out) == (0, "hello\n" * 5), err
    work = ("consume", full, "-s", "work", "--type", "shared", "--from", "earliest", "--timeout", "0.2")
    assert run(*work, "--url", broker.service_url)[0] == 0
    assert admin.scalable_topics.get_stats(topic).subscriptions["work"].type == "QUEUE"


def test_a_consumer_for_regular_topics_is_told_what_to_use_instead(broker: BackgroundBroker, topic: str) -> None:
    async def read(name: str) -> None:
        async with connect(broker.service_url) as client:
            await client.consumer(name, "sub")

    for name in (topic, f"topic://public/default/{topic}"):
        with pytest.raises(NotAllowed, match=r"stream.*queue.*checkpoint"):
            broker.run(read(name))


@pytest.mark.parametrize("name", ["plain", "parted", "parted-partition-1", "new"])
def test_regular_topics_are_read_as_ever(run: Run, broker: BackgroundBroker, admin: AdminClient, name: str) -> None:
    if name == "plain":
        admin.topics.create(name)
    elif name == "parted":
        admin.topics.create(name, partitions=3)
    reading = ("consume", name, "-s", f"sub-{name}", "--from", "earliest", "--timeout", "0.1", "--url", broker.service_url)
    assert run(*reading)[0] == 0
    assert run("produce", name, "-n", "5", "-m", "hello", "--url", broker.service_url)[0] == 0
    assert run(*reading)[:2] == (0, "hello\n" * 5)
    assert admin.scalable_topics.list() == [each for each in admin.scalable_topics.list() if name not in each]


def test_several_brokers_are_given_as_the_ready_line_shows_them(run: Run, broker: BackgroundBroker) -> None:
    address = broker.http_url.removeprefix("http://")
    for url in (f"http://127.0.0.1:1,{address}", f"{broker.http_url},{address},{address}/"):
        assert worked(run("tenants", "list", "--url", url)).split() == ["public", "pulsar"]
    code, _out, err = run("tenants", "list", "--url", f"{address},{broker.http_url}")
    assert code == 2 and "write http://host:port" in err


async def store(broker: BackgroundBroker, segment: str) -> None:
    client = await RawClient.connect(broker.service_url)
    try:
        await client.producer(segment)
        await client.store(b"x", 0)
    finally:
        client.close()


def test_backlogs_are_called_what_they_are(run: Run, broker: BackgroundBroker, topic: str) -> None:
    assert run("produce", topic, "-n", "100", "--batch", "50", "--url", broker.service_url)[0] == 0
    for command in (("scalable-topics", "stats", topic), ("scalable-topics", "dag", topic)):
        out = worked(run(*command))
        assert "entries left" in out and "messages" not in out.replace("messages  ", "")
    out = worked(run("segments", "backlog", f"segment://public/default/{topic}/0000-7fff-0", "sub"))
    assert out.startswith("entries left") and "messages" not in out


def test_a_segment_in_use_is_ended_or_deleted_only_by_force(
    run: Run, broker: BackgroundBroker, admin: AdminClient, topic: str
) -> None:
    segment = f"segment://public/default/{topic}/0000-7fff-0"
    broker.run(store(broker, segment))
    for verb in ("terminate", "delete"):
        code, _out, err = run("segments", verb, segment, "-y")
        assert code == 1 and "force" in err, err
    assert admin.segments.stats(segment).backlog == {"sub": 1}
    worked(run("segments", "terminate", segment, "--force", "-y"))
    assert admin.segments.stats(segment).is_terminated
    worked(run("segments", "delete", segment, "--force", "-y"))
