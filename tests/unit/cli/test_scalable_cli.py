"""`braid scalable-topics` and `braid segments` against a real broker: their output, the drawing, and how they fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from braid.cli import dag
from braid.cli import main as cli
from braid.client.blocking import AdminClient
from braid.runtime.clock import SystemClock
from braid.testing.broker import BackgroundBroker
from braid.testing.raw_client import RawClient


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


@pytest.fixture(scope="module")
def admin(broker: BackgroundBroker) -> Iterator[AdminClient]:
    with AdminClient(broker.http_url) as client:
        yield client


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], broker: BackgroundBroker) -> Run:
    monkeypatch.setenv("BRAID_ADMIN_URL", broker.http_url)

    def braid_command(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["braid", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        seen = capfdbinary.readouterr()
        assert b"Traceback" not in seen.err
        return Outcome(int(ended.value.code or 0), seen.out.decode(), seen.err.decode())

    return braid_command


def done(outcome: Outcome) -> str:
    assert (outcome.code, outcome.err) == (0, "")
    return outcome.out


def test_a_topic_from_creation_to_deletion(run: Run) -> None:
    name = "topic://public/default/orders"
    assert done(run("scalable-topics", "create", name, "--segments", "2", "--property", "team=a")) == (
        f"done: scalable-topics create (topic {name}, segments 2, properties team=a)\n"
    )
    assert done(run("scalable-topics", "list")) == f"{name}\n"
    assert run("scalable-topics", "list", "--property", "team=b").err == "No scalable-topics found.\n"
    done(run("scalable-topics", "create-subscription", "orders", "billing"))
    done(run("scalable-topics", "create-subscription", "orders", "audit", "--kind", "QUEUE", "--at", "latest"))
    done(run("scalable-topics", "split-segment", "orders", "0"))
    done(run("scalable-topics", "merge-segments", "orders", "3", "1"))
    shown = done(run("scalable-topics", "get-metadata", "orders"))
    assert "4000-ffff" in shown and "sealed" in shown and "high16" in shown
    assert run("scalable-topics", "get-metadata", "orders", "--output", "json").json["nextSegmentId"] == 5
    stats = done(run("scalable-topics", "stats", "orders"))
    assert "segment://public/default/orders/4000-ffff-4" in stats and "nobody consumes it" in stats
    assert run("scalable-topics", "stats", "orders", "--output", "json").json["activeSegments"] == 2
    done(run("scalable-topics", "seek", "orders", "billing", "2h", "--yes"))
    done(run("scalable-topics", "seek", "orders", "billing", "earliest", "--yes"))
    done(run("scalable-topics", "clear-backlog", "orders", "billing", "--yes"))
    missing = run("scalable-topics", "remove-consumer", "orders", "billing", "worker-7", "--yes")
    assert missing.code == 1 and "has no consumer worker-7" in missing.err
    done(run("scalable-topics", "delete-subscription", "orders", "billing", "--yes"))
    segment = "segment://public/default/orders/4000-ffff-4"
    assert done(run("segments", "subscriptions", segment)) == "audit\n"
    assert "owner" in done(run("segments", "stats", segment))
    assert run("segments", "backlog", segment, "audit", "--output", "json").json["messages"] == 0
    done(run("segments", "create", segment, "--subscription", "x", "--subscription", "y"))
    assert run("segments", "subscriptions", segment, "--output", "json").json == ["audit", "x", "y"]
    done(run("scalable-topics", "delete", "orders", "--yes"))
    assert run("scalable-topics", "get-metadata", "orders").code == 1


@pytest.mark.parametrize(
    "arguments",
    [
        ("NAME", "--segments", "2", "--property", "a=1", "--property", "b=2"),
        ("--segments", "2", "--property", "a=1", "--property", "b=2", "NAME"),
        ("--property", "a=1", "NAME", "--property", "b=2", "--segments=2"),
        ("--property=a=1", "--property=b=2", "--segments=2", "NAME"),
    ],
)
def test_options_stand_before_or_after_the_name(run: Run, admin: AdminClient, arguments: tuple[str, ...]) -> None:
    name = f"topic://public/default/order-{abs(hash(arguments))}"
    done(run("scalable-topics", "create", *(name if each == "NAME" else each for each in arguments)))
    found = admin.scalable_topics.get_metadata(name)
    assert (len(found.segments), found.properties) == (2, {"a": "1", "b": "2"})
    done(run("scalable-topics", "delete", "--yes", name))


@pytest.mark.parametrize(
    "name", ["topic://public/default/a/b c", "topic://public/default/100% é", "topic://public/default/[red]"]
)
def test_names_that_need_escaping(run: Run, name: str) -> None:
    done(run("scalable-topics", "create", name))
    assert name in done(run("scalable-topics", "list"))
    done(run("scalable-topics", "create-subscription", name, "é %"))
    done(run("scalable-topics", "split-segment", name, "0"))
    assert name in done(run("scalable-topics", "dag", name))
    assert done(run("segments", "subscriptions", name.replace("topic:", "segment:") + "/0000-7fff-1")) == "é %\n"
    done(run("scalable-topics", "delete", name, "--yes"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("scalable-topics", "create", "x", "--segments", "0"), 1, "0 segments"),
        (("scalable-topics", "create", "x", "--segments", "-1"), 1, "-1 segments"),
        (("scalable-topics", "create", "x", "--segments", "65537"), 1, "65537"),
        (("scalable-topics", "create", "x", "--segments", "two"), 2, "'--segments': Input should be a valid integer"),
        (("scalable-topics", "create", "x", "--routing", "mod-N"), 1, "high16, low16"),
        (("scalable-topics", "create", "persistent://public/default/x"), 1, "no scalable topic"),
        (("scalable-topics", "get-metadata", "missing"), 1, "`braid scalable-topics list TENANT/NAMESPACE` shows"),
        (("scalable-topics", "dag", "missing"), 1, "`braid scalable-topics list TENANT/NAMESPACE` shows"),
        (("scalable-topics", "dag", "missing", "--output", "xml"), 2, "--output"),
        (("scalable-topics", "split-segment", "missing", "0"), 1, "missing"),
        (("scalable-topics", "split-segment", "missing", "x"), 2, "'segment': Input should be a valid integer"),
        (("scalable-topics", "merge-segments", "missing", "0"), 2, "Missing argument 'other'"),
        (("scalable-topics", "seek", "missing", "s", "7:42", "--yes"), 2, "no time"),
        (("scalable-topics", "seek", "missing", "s", "latest", "--yes"), 2, "use clear-backlog"),
        (("scalable-topics", "create-subscription", "missing", "s", "--kind", "shared"), 1, "no kind of subscription"),
        (("scalable-topics", "list", "--property", "x"), 2, "key=value"),
        (("segments", "stats", "orders"), 1, "names no segment"),
        (("segments", "stats", "segment://public/default/missing/0000-ffff-0"), 1, "missing"),
        (("topics", "stats", "topic://public/default/x"), 1, "braid scalable-topics"),
        (("topics", "delete", "topic://public/default/x", "--yes"), 1, "braid scalable-topics"),
        (("topics", "create", "segment://public/default/x/0000-7fff-0"), 1, "braid segments"),
        (("subscriptions", "list", "topic://public/default/x"), 1, "braid scalable-topics"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(run: Run, arguments: tuple[str, ...], code: int, words: str) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (code, ""), outcome.err
    assert words in " ".join(outcome.err.split())


def test_the_dag_is_drawn_with_load_and_reasons(run: Run, broker: BackgroundBroker, admin: AdminClient) -> None:
    admin.scalable_topics.create("drawn", segments=2)
    admin.scalable_topics.create_subscription("drawn", "billing")

    async def send() -> None:
        client = await RawClient.connect(broker.service_url)
        await client.producer("segment://public/default/drawn/0000-7fff-0")
        for number in range(3):
            await client.store(b"x", number)
        client.close()

    broker.run(send())
    admin.scalable_topics.split_segment("drawn", 0)
    shown = done(run("scalable-topics", "dag", "drawn"))
    lines = shown.splitlines()
    assert lines[0] == "topic://public/default/drawn: epoch 1, 3 active and 1 sealed segments, routing high16"
    assert lines[1] == f"leader: {broker.http_url.removeprefix('http://')}; under way: nothing"
    assert "0 sealed 0000-7fff" in lines[3] and "1 active 8000-ffff" in lines[3] and len(lines[3]) == 100
    assert "2 active" in lines[4] and "3 active" in lines[4] and len(lines[4]) == 50
    assert lines[5].startswith("0000") and lines[5].endswith("ffff")
    assert "billing=3" in shown and "nobody consumes it" in shown and "\x1b" not in shown
    found = run("scalable-topics", "dag", "drawn", "--output", "json").json
    assert found["generations"] == {"0": 0, "1": 0, "2": 1, "3": 1}
    assert found["metadata"]["segments"]["2"]["parentIds"] == [0]
    assert found["stats"]["segments"]["0"]["backlog"] == {"billing": 3}
    few = done(run("scalable-topics", "dag", "drawn", "--rows", "3"))
    assert "1 more are not shown" in few


@pytest.mark.parametrize("output", ["text", "json"])
def test_watching_without_a_terminal_shows_look_after_look(
    run: Run, admin: AdminClient, monkeypatch: pytest.MonkeyPatch, output: str
) -> None:
    admin.scalable_topics.create(f"watched-{output}")

    class Patience(SystemClock):
        """Splits the topic between the first two looks; after the third the user has had enough."""

        sleeps = 0

        async def sleep(self, delay: float) -> None:
            Patience.sleeps += 1
            if Patience.sleeps == 3:
                raise KeyboardInterrupt
            if Patience.sleeps == 1:
                await asyncio.to_thread(admin.scalable_topics.split_segment, f"watched-{output}", 0)

    monkeypatch.setattr(dag, "SystemClock", Patience)
    outcome = run("scalable-topics", "dag", f"watched-{output}", "--watch", "--interval", "0.1", "--output", output)
    assert outcome.code == 130
    if output == "json":
        assert [json.loads(line)["metadata"]["epoch"] for line in outcome.out.splitlines()] == [0, 1, 1]
    else:
        heads = [line for line in outcome.out.splitlines() if line.startswith("topic://")]
        assert ["epoch 0" in head for head in heads] == [True, False, False]


def test_on_a_terminal_the_screen_is_rewritten(
    run: Run, admin: AdminClient, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    admin.scalable_topics.create("screen", segments=2)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    class Once(SystemClock):
        async def sleep(self, delay: float) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(dag, "SystemClock", Once)
    outcome = run("scalable-topics", "dag", "screen", "--watch")
    assert outcome.code == 130
    assert "\x1b[?1049h" in outcome.out and "2 active and 0 sealed" in outcome.out


def test_top_and_the_brokers_topics_show_segments(run: Run, admin: AdminClient) -> None:
    admin.scalable_topics.create("seen", segments=2)
    admin.segments.stats("segment://public/default/seen/0000-7fff-0")
    names = {
        row["topic"] for row in run("top", "--once", "--interval", "0.1", "--rows", "1000", "--output", "json").json["topics"]
    }
    assert "segment://public/default/seen/0000-7fff-0" in names
    assert "segment://public/default/seen/0000-7fff-0" in done(run("top", "--once", "--interval", "0.1", "--rows", "1000"))
    rows = done(run("brokers", "topics")).splitlines()
    row = next(line for line in rows if "segment://public/default/seen/0000-7fff-0" in line)
    assert "0x" in row
    assert "seen" not in run("topics", "list").out


@pytest.mark.parametrize("kind", ["exclusive", "shared"])
def test_messages_go_in_and_come_out_across_a_split(
    run: Run, broker: BackgroundBroker, admin: AdminClient, tmp_path: Path, kind: str
) -> None:
    topic = f"topic://public/default/lines-{kind}"
    admin.scalable_topics.create(topic, segments=2)
    lines = tmp_path / "lines"
    for number in range(2):
        lines.write_text("".join(f"{number}-{each}\n" for each in range(20)))
        sent = run("produce", topic, "--file", str(lines), "--key", "k{i}", "--url", broker.service_url)
        assert (sent.code, "sent 20 messages" in sent.err) == (0, True), sent.err
        admin.scalable_topics.split_segment(topic, number)
    got = run("consume", topic, "-s", "s", "--type", kind, "--from", "earliest", "--count", "40", "--url", broker.service_url)
    assert got.code == 0, got.err
    assert sorted(got.out.split()) == sorted(f"{number}-{each}" for number in range(2) for each in range(20))
    again = run("consume", topic, "-s", "s", "--type", kind, "--timeout", "0.3", "--url", broker.service_url)
    assert (again.code, again.out) == (0, "")
