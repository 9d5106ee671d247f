"""`braid <noun> <verb>`: every command against a real broker, its JSON, its help, its questions, and how it fails."""

from __future__ import annotations

import asyncio
import io
import json
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import braid
from braid.cli import main as cli
from braid.cli.admin_commands import CLASSES, make
from braid.cli.admin_groups import NOUNS
from braid.cli.admin_values import message_id_of, pairs_of, start_of, target_of
from braid.cli.progress import Steps
from braid.client.messages import MessageId
from braid.client.operations import OPERATIONS, Operation, operations_of
from braid.errors import ConfigError
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock

COMMANDS = list({(each.noun, each.verb): operations_of(each.noun, each.verb)[0] for each in OPERATIONS}.values())
NAMES = [each.name for each in COMMANDS]


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        assert self.out.count("\n") == 1
        return json.loads(self.out)


Run = Callable[..., Outcome]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes], broker: BackgroundBroker) -> Run:
    """`braid` with these arguments, as the installed program runs it, for the broker of this module."""
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


@pytest.fixture
def done(run: Run) -> Callable[..., str]:
    """The same for a command that must succeed; returns what it shows."""

    def succeed(*arguments: str) -> str:
        outcome = run(*arguments)
        assert (outcome.code, outcome.err) == (0, ""), arguments
        return outcome.out

    return succeed


def send(broker: BackgroundBroker, topic: str, *payloads: bytes, batching: bool = False) -> list[MessageId]:
    async def work() -> list[MessageId]:
        async with braid.connect(broker.service_url) as client:
            producer = await client.producer(topic, batching=batching)
            return [await producer.send(each) for each in payloads]

    return broker.run(work())


Done = Callable[..., str]


# What every command has.


def test_every_noun_of_the_client_is_a_group_of_commands() -> None:
    assert set(NOUNS) == set(CLASSES) == {each.noun for each in OPERATIONS}


def test_every_help_has_an_example_and_the_common_options() -> None:
    for operation in COMMANDS:
        command = make(operation.noun, operation.verb)
        shown = " ".join(command.make_context(operation.verb, [], resilient_parsing=True).get_help().split())
        assert operation.summary.partition(";")[0] in shown
        assert f"Example: braid {operation.name}" in shown
        for option in ("--url", "--output", "--timeout", *(["--yes"] if operation.is_destructive else [])):
            assert option in shown


DESTRUCTIVE = [each for each in COMMANDS if each.is_destructive]


@pytest.mark.parametrize("operation", DESTRUCTIVE, ids=[each.name for each in DESTRUCTIVE])
def test_what_destroys_refuses_without_yes(run: Run, operation: Operation[Any]) -> None:
    arguments = operation.example.partition(".")[0].replace("--yes", "").split()
    outcome = run(operation.noun, operation.verb, *arguments, "--url", "http://localhost:1")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"braid {operation.name}" in outcome.err
    assert "add --yes" in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("operation", COMMANDS, ids=NAMES)
def test_the_example_is_understood_and_a_dead_broker_is_told_in_one_line(run: Run, operation: Operation[Any]) -> None:
    arguments = operation.example.partition(". ")[0].split()
    outcome = run(operation.noun, operation.verb, *arguments, "--url", "http://localhost:1")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "error: No broker answers at http://localhost:1 (connection refused). Start one with `braid standalone`, "
        "or give the address of its admin API. (--url or BRAID_ADMIN_URL)\n"
    )


def test_a_terminal_is_asked(monkeypatch: pytest.MonkeyPatch, run: Run, done: Done) -> None:
    done("topics", "create", "asked")

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    refused = run("topics", "delete", "asked")
    assert (refused.code, "Nothing was done." in refused.err) == (1, True)
    assert "This cannot be undone: asked. Go on?" in refused.err
    monkeypatch.setattr(sys, "stdin", Terminal(""))  # Ctrl-C and Ctrl-D look the same here
    interrupted = run("topics", "delete", "asked")
    assert (interrupted.code, "Nothing was done." in interrupted.err) == (130, True)
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    assert run("topics", "delete", "asked").code == 0
    assert run("topics", "stats", "asked").code == 1


# The nouns, one by one.


def test_topics(run: Run, done: Done, broker: BackgroundBroker) -> None:
    assert done("topics", "create", "orders") == "done: topics create (topic orders)\n"
    assert run("topics", "create", "lots", "--partitions", "2", "--output", "json").json == {
        "done": "topics create",
        "topic": "lots",
        "partitions": 2,
    }
    assert done("topics", "list").splitlines() == [
        "persistent://public/default/lots-partition-0",
        "persistent://public/default/lots-partition-1",
        "persistent://public/default/orders",
    ]
    assert run("topics", "partitioned", "public/default", "--output", "json").json == ["persistent://public/default/lots"]
    done("topics", "grow", "lots", "3")
    assert done("topics", "partitions", "persistent://public/default/lots") == "3\n"
    assert run("topics", "partitions", "orders", "--output", "json").json == 0
    done("topics", "create-missed-partitions", "lots")
    (sent,) = send(broker, "orders", b"hello")
    stats = run("topics", "stats", "orders", "--output", "json").json
    assert (stats["msgInCounter"], stats["ownerBroker"]) == (1, broker.http_url.removeprefix("http://"))
    assert {"msgRateIn", "msgRateOut", "storageSize", "publishers", "subscriptions", "backlogSize"} <= set(stats)
    assert "msg in counter" in done("topics", "stats", "orders")
    assert "lots-partition-2" in done("topics", "partitioned-stats", "lots")
    assert run("topics", "partitioned-stats", "lots", "--no-per-partition", "--output", "json").json["partitions"] == {}
    assert "LedgerOpened" in done("topics", "internal-stats", "orders")
    assert len(run("topics", "partitioned-internal-stats", "lots", "--output", "json").json["partitions"]) == 3
    assert run("topics", "lookup", "orders", "--output", "json").json["brokerUrl"] == broker.service_url
    assert done("topics", "bundle", "orders").startswith("0x")
    place = f"{sent.ledger_id}:{sent.entry_id}"
    assert done("topics", "last-message-id", "orders") == f"{place}:-1\n"
    assert "hello" in done("topics", "message", "orders", place)
    assert run("topics", "message", "orders", place, "--output", "json").json["payloads"] == ["hello"]
    done("topics", "grant", "orders", "ops", "--action", "produce", "--action", "consume")
    assert run("topics", "permissions", "orders", "--output", "json").json == {"ops": ["consume", "produce"]}
    assert "ops" in done("topics", "permissions", "orders")
    done("topics", "revoke", "orders", "ops")
    done("topics", "set-properties", "orders", "a=1", "b=2=3")
    done("topics", "remove-property", "orders", "a")
    assert run("topics", "properties", "orders", "--output", "json").json == {"b": "2=3"}
    for verb in ("unload", "trim"):
        done("topics", verb, "orders")
    done("topics", "truncate", "orders", "--yes")
    assert run("topics", "terminate", "orders", "--yes", "--output", "json").json["ledgerId"] == sent.ledger_id
    ended = run("topics", "terminate-partitions", "lots", "-y", "--output", "json").json
    assert ended == {str(each): {"ledgerId": -1, "entryId": -1, "partitionIndex": each} for each in range(3)}
    mixed = run("topics", "delete", "orders", "missing", "lots", "--yes")
    assert (mixed.code, mixed.out) == (1, "")
    assert mixed.err.splitlines()[-1] == "error: 1 of 3 topics were not deleted; see above."
    empty = run("topics", "list")
    assert (empty.code, empty.out, empty.err) == (0, "", "No topics found.\n")


def test_subscriptions(run: Run, done: Done, broker: BackgroundBroker) -> None:
    done("subscriptions", "create", "moves", "audit", "--at", "earliest", "--property", "a=b")
    assert done("subscriptions", "list", "moves") == "audit\n"
    assert run("subscriptions", "properties", "moves", "audit", "--output", "json").json == {"a": "b"}
    done("subscriptions", "set-properties", "moves", "audit", "c=d")
    ids = send(broker, "moves", b"one", b"\x1b[31mtwo", b"\xff")

    def backlog() -> int:
        stats = run("topics", "stats", "moves", "--output", "json").json
        return int(stats["subscriptions"]["audit"]["msgBacklog"])

    seen = run("subscriptions", "peek", "moves", "audit", "--count", "5", "--output", "json").json
    assert [each.get("payloads") for each in seen] == [["one"], ["\x1b[31mtwo"], None]
    assert seen[2]["payloadsBase64"] == ["/w=="]
    shown = done("subscriptions", "peek", "moves", "audit", "--position", "2")
    assert "\x1b" not in shown
    assert r"\x1b[31mtwo" in shown
    done("subscriptions", "skip", "moves", "audit", "1", "--yes")
    assert backlog() == 2
    for where, left in (
        ("latest", 0),
        ("earliest", 3),
        (f"{ids[1].ledger_id}:{ids[1].entry_id}", 2),
        ("2d", 3),
        ("2999-01-01T00:00:00Z", 0),
        ("2020-01-01", 3),
    ):
        done("subscriptions", "reset", "moves", "audit", where, "--yes")
        assert backlog() == left, where
    done("subscriptions", "reset", "moves", "audit", str(ids[0]), "--excluded", "--yes")
    assert backlog() == 2
    done("subscriptions", "skip-all", "moves", "audit", "--yes")
    assert backlog() == 0
    assert run("subscriptions", "peek", "moves", "audit").code == 1
    missing = run("subscriptions", "delete", "moves", "nobody", "--yes")
    assert missing.code == 1
    assert "`braid subscriptions list TOPIC` shows what there is." in missing.err
    done("subscriptions", "delete", "moves", "audit", "--yes")


@pytest.mark.parametrize("partitions", [0, 3])
def test_old_messages_are_skipped_and_young_ones_stay(run: Run, partitions: int) -> None:
    """Ages are told apart by the broker's clock, which is moved by hand."""
    names = [f"aged-partition-{number}" for number in range(partitions)] or ["aged"]
    with BackgroundBroker(clock=ManualClock()) as aged:

        def braid_command(*arguments: str) -> Outcome:
            return run(*arguments, "--url", aged.http_url)

        def waiting(subscription: str) -> set[tuple[str, ...]]:
            """What is left in each partition; it must be the same in all of them."""
            found = set()
            for name in names:
                outcome = braid_command("subscriptions", "peek", name, subscription, "--count", "9", "--output", "json")
                assert outcome.code == 0 or "has no message 1" in outcome.err
                seen = outcome.json if outcome.code == 0 else []
                found.add(tuple(payload for each in seen for payload in each["payloads"]))
            return found

        assert braid_command("topics", "create", "aged", "--partitions", str(partitions)).code == 0
        for subscription in ("audit", "other"):
            assert braid_command("subscriptions", "create", "aged", subscription, "--at", "earliest").code == 0
        for payload in (b"ancient", b"old", b"young"):
            for name in names:
                send(aged, name, payload)
            aged.advance(100)
        # They are now 300, 200 and 100 seconds old.
        for seconds, left in (
            ("3600", ("ancient", "old", "young")),
            ("250", ("old", "young")),
            ("250", ("old", "young")),
            ("150", ("young",)),
            ("3600", ("young",)),
        ):
            assert braid_command("subscriptions", "expire", "aged", "audit", seconds, "--yes").code == 0
            assert waiting("audit") == {left}, seconds
        assert waiting("other") == {("ancient", "old", "young")}
        assert braid_command("subscriptions", "expire-all", "aged", "250", "--yes").code == 0
        assert (waiting("audit"), waiting("other")) == ({("young",)}, {("old", "young")})
        assert braid_command("subscriptions", "expire", "aged", "nobody", "250", "--yes").code == 1
        assert braid_command("subscriptions", "expire-all", "aged", "0", "--yes").code == 0
        assert (waiting("audit"), waiting("other")) == ({()}, {()})


def test_batches_are_shown_message_by_message(run: Run, broker: BackgroundBroker) -> None:
    async def work() -> None:
        async with braid.connect(broker.service_url) as client:
            producer = await client.producer("batched")
            for number in range(3):
                producer.send_nowait(b"%d" % number)
            await producer.flush()

    run("subscriptions", "create", "batched", "s", "--at", "earliest")
    broker.run(work())
    seen = run("subscriptions", "peek", "batched", "s", "--output", "json", "--count", "3").json
    assert [payload for each in seen for payload in each["payloads"]] == ["0", "1", "2"]


@pytest.mark.parametrize(("noun", "get"), [("topics", "retention"), ("scalable-topics", "get-retention")])
def test_retention_of_a_topic(run: Run, done: Done, noun: str, get: str) -> None:
    name = f"kept-by-{noun}"
    done(noun, "create", name)
    unset = run(noun, get, name)
    assert (unset.code, unset.out, unset.err) == (0, "", "Not set: the namespace's policy applies.\n")
    applied = run(noun, get, name, "--applied", "--output", "json").json
    assert applied == {"retentionTimeInMinutes": 0, "retentionSizeInMB": 0}
    done(noun, "set-retention", name, "--minutes", "5", "--megabytes", "-1", "--yes")
    assert run(noun, get, name, "--output", "json").json == {"retentionTimeInMinutes": 5, "retentionSizeInMB": -1}
    done(noun, "remove-retention", name, "--yes")
    assert run(noun, get, name, "--output", "json").json is None


def test_tenants_namespaces_and_clusters(run: Run, done: Done) -> None:
    done("tenants", "create", "acme", "--admin-role", "ops", "--admin-role", "sre")
    assert run("tenants", "get", "acme", "--output", "json").json == {
        "adminRoles": ["ops", "sre"],
        "allowedClusters": ["standalone"],
    }
    done("tenants", "update", "acme", "--cluster", "standalone")
    assert "acme" in done("tenants", "list").splitlines()
    done("namespaces", "create", "acme/sales", "--bundles", "2")
    assert done("namespaces", "list", "acme") == "acme/sales\n"
    assert len(run("bundles", "list", "acme/sales", "--output", "json").json) == 2
    assert run("namespaces", "policies", "acme/sales", "--output", "json").json["retention_policies"] is None
    unset = run("namespaces", "retention", "acme/sales")
    assert (unset.code, unset.out, unset.err) == (0, "", "Not set: the broker's setting applies.\n")
    assert run("namespaces", "retention", "acme/sales", "--output", "json").json is None
    done("namespaces", "set-retention", "acme/sales", "--minutes", "5", "--megabytes", "-1", "--yes")
    assert run("namespaces", "retention", "acme/sales", "--output", "json").json == {
        "retentionTimeInMinutes": 5,
        "retentionSizeInMB": -1,
    }
    done("namespaces", "remove-retention", "acme/sales", "--yes")
    done("namespaces", "set-deduplication", "acme/sales", "--disable")
    assert done("namespaces", "deduplication", "acme/sales") == "false\n"
    done("namespaces", "set-auto-topics", "acme/sales", "--partitions", "2")
    assert run("namespaces", "auto-topics", "acme/sales", "--output", "json").json["defaultNumPartitions"] == 2
    done("namespaces", "set-auto-subscriptions", "acme/sales", "--disable")
    assert done("namespaces", "auto-subscriptions", "acme/sales") == "false\n"
    for policy in ("deduplication", "auto-topics", "auto-subscriptions"):
        done("namespaces", f"remove-{policy}", "acme/sales")
    done("namespaces", "set-schema-strategy", "acme/sales", "FULL")
    assert done("namespaces", "schema-strategy", "acme/sales") == "FULL\n"
    done("namespaces", "set-properties", "acme/sales", "team=x")
    assert run("namespaces", "properties", "acme/sales", "--output", "json").json == {"team": "x"}
    done("namespaces", "remove-properties", "acme/sales", "--yes")
    done("namespaces", "grant", "acme/sales", "ops", "--action", "produce")
    assert run("namespaces", "permissions", "acme/sales", "--output", "json").json == {"ops": ["produce"]}
    done("namespaces", "revoke", "acme/sales", "ops")
    done("topics", "create", "acme/sales/t")
    done("subscriptions", "create", "acme/sales/t", "s")
    assert done("namespaces", "topics", "acme/sales") == "persistent://acme/sales/t\n"
    done("namespaces", "clear-backlog", "acme/sales", "--yes")
    done("namespaces", "clear-backlog", "acme/sales", "--subscription", "s", "--yes")
    done("namespaces", "unsubscribe", "acme/sales", "s", "--yes")
    assert run("subscriptions", "list", "acme/sales/t", "--output", "json").json == []
    done("namespaces", "unload", "acme/sales")
    done("topics", "delete", "acme/sales/t", "--yes")
    done("topics", "create", "acme/sales/more", "--partitions", "2")
    full = run("namespaces", "delete", "acme/sales", "--yes")
    assert (full.code, "still has topics" in full.err) == (1, True)
    done("namespaces", "delete", "acme/sales", "--force", "--yes")
    assert run("topics", "list", "acme/sales").code == 1
    done("tenants", "delete", "acme", "--yes")
    assert done("clusters", "list") == "standalone\n"
    done("clusters", "create", "west", "--service-url", "http://west:8080")
    done("clusters", "update", "west", "--service-url", "http://west:8081")
    assert run("clusters", "get", "west", "--output", "json").json["serviceUrl"] == "http://west:8081"
    done("clusters", "delete", "west", "--yes")


def test_brokers_and_bundles(run: Run, done: Done, broker: BackgroundBroker) -> None:
    name = broker.http_url.removeprefix("http://")
    send(broker, "public/default/owned", b"x")
    assert done("brokers", "list") == f"{name}\n"
    assert run("brokers", "leader", "--output", "json").json["brokerId"] == name
    for verb in ("health", "ready"):
        assert done("brokers", verb) == "ok\n"
    assert done("brokers", "health", "--broker", name) == "ok\n"
    assert done("brokers", "version") == f"{braid.__version__}\n"
    assert run("brokers", "configuration", "--output", "json").json["max_message_size"] == "5242880"
    bundle = done("topics", "bundle", "owned").strip()
    assert f"public/default/{bundle}" in run("brokers", "owned", name, "--output", "json").json
    assert f"public/default/{bundle}" in done("brokers", "owned", name)
    assert "persistent://public/default/owned" in json.dumps(run("brokers", "topics", "--output", "json").json)
    assert bundle in done("brokers", "topics")
    assert run("brokers", "load", "--output", "json").json["numBundles"] >= 1
    assert "no-such:1" in run("brokers", "owned", "no-such:1").err
    done("bundles", "unload", "public/default", bundle)
    before = done("bundles", "list", "public/default").splitlines()
    assert bundle in before
    unknown = run("bundles", "transfer", "public/default", bundle, "no-such:1")
    assert (unknown.code, unknown.err.count("\n")) == (1, 1)
    done("bundles", "split", "public/default", bundle, "--yes")
    assert len(done("bundles", "list", "public/default").splitlines()) == len(before) + 1
    wrong = run("bundles", "unload", "public/default", "0x0_0x1")
    assert (wrong.code, wrong.err.count("\n")) == (1, 1)


# What goes wrong.


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["topics", "stats", "missing"], 1, "missing does not exist"),
        (["topics", "stats", "missing"], 1, "`braid topics list TENANT/NAMESPACE` shows what there is."),
        (["topics", "stats", "a/b"], 1, "has 2 parts"),
        (["topics", "stats", "persistent://a/b"], 1, "must have the form"),
        (["topics", "stats", "non-persistent://a/b/c"], 1, "only persistent topics"),
        (["topics", "list", "public"], 1, "must have the form tenant/namespace"),
        (["topics", "list", "no/where"], 1, "no/where"),
        (["topics", "list", "no/where"], 1, "`braid namespaces list TENANT` shows what there is."),
        (["bundles", "list", "no/where"], 1, "`braid namespaces list TENANT` shows what there is."),
        (["namespaces", "create", "no/where"], 1, "`braid tenants list` shows what there is."),
        (["tenants", "get", "nobody"], 1, "nobody"),
        (["tenants", "get", "nobody"], 1, "`braid tenants list` shows what there is."),
        (["clusters", "get", "nowhere"], 1, "`braid clusters list` shows what there is."),
        (["subscriptions", "peek", "missing", "s"], 1, "`braid topics list TENANT/NAMESPACE` shows what there is."),
        (["subscriptions", "peek", "t", "s", "--count", "0"], 2, "--count must be at least 1, not 0."),
        (["tenants", "create", "ä"], 1, "ä"),
        (["subscriptions", "list", "missing"], 1, "missing does not exist"),
        (["subscriptions", "reset", "t", "s", "middle", "--yes"], 2, "is no place in a topic"),
        (["subscriptions", "create", "t", "s", "--at", "2d"], 2, "write earliest, latest or a message id"),
        (["topics", "message", "t", "latest"], 2, "write ledger:entry"),
        (["topics", "set-properties", "t", "novalue"], 2, "write key=value"),
        (["topics", "list", "--output", "xml"], 2, "--output must be one of text, json"),
        (["topics", "list", "--url", "pulsar://localhost:6650"], 2, "That is the binary protocol"),
        (["topics", "list", "--url", "localhost:8080"], 2, "write http://host:port"),
        (["topics", "create"], 2, "Missing argument"),
        (["topics", "grow", "t", "many"], 2, "valid integer"),
        (["topics", "grant", "t", "role"], 2, "--action"),
        (["topics", "nonsense"], 2, "nonsense"),
        (["top"], 2, "add --once"),
        (["top", "--once", "--sort", "luck"], 2, "--sort must be one of"),
        (["top", "--once", "--namespace", "x"], 1, "must have the form tenant/namespace"),
        (["top", "--once", "--url", "http://localhost:1"], 1, "connection refused"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(run: Run, arguments: list[str], code: int, text: str) -> None:
    outcome = run(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert text in outcome.err
    if "Usage:" not in outcome.err:
        assert outcome.err.count("\n") == 1


def test_the_port_of_the_binary_protocol_is_recognised(run: Run, broker: BackgroundBroker) -> None:
    outcome = run("topics", "list", "--url", broker.service_url.replace("pulsar://", "http://"))
    assert outcome.code == 1
    assert "not at the address of the binary protocol" in outcome.err.splitlines()[-1]


def test_conflicts_and_use_are_told_in_the_brokers_words(run: Run, done: Done) -> None:
    done("topics", "create", "twice")
    outcome = run("topics", "create", "twice")
    assert (outcome.code, outcome.err.count("\n")) == (1, 1)
    assert "persistent://public/default/twice already exists" in outcome.err


def test_what_a_peer_says_moves_no_cursor(run: Run) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 418 X\r\ncontent-length: 9\r\nconnection: close\r\n\r\n\x1b[2Jgone\x07")
        writer.close()

    with asyncio.Runner() as runner:
        server = runner.run(asyncio.start_server(serve, "127.0.0.1", 0))
        thread = threading.Thread(target=runner.get_loop().run_forever)
        thread.start()
        outcome = run("clusters", "list", "--url", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        runner.get_loop().call_soon_threadsafe(server.close)
        runner.get_loop().call_soon_threadsafe(runner.get_loop().stop)
        thread.join()
    assert outcome.code == 1
    assert outcome.err.endswith(r"answered 418 to GET /admin/v2/clusters: \x1b[2Jgone\x07." + "\n")


def test_several_addresses(run: Run, broker: BackgroundBroker) -> None:
    assert run("clusters", "list", "--url", f"http://localhost:1,{broker.http_url}").out == "standalone\n"


# Values and progress.


def test_places_in_a_topic() -> None:
    now = 1_800_000_000_000
    assert start_of("EARLIEST") == "earliest"
    assert target_of("latest", now) == "latest"
    assert message_id_of("7:42:3:1") == MessageId(7, 42, 3, 1)
    assert start_of("7:42") == target_of("7:42:-1", now) == MessageId(7, 42)
    ago = target_of("90m", now)
    assert not isinstance(ago, str | MessageId)
    assert ago.timestamp() == now / 1000 - 5400
    local = target_of("2026-01-31T12:00:00", now)
    assert not isinstance(local, str | MessageId)
    assert local.tzinfo is not None
    for text in ("", "5x", "999999999d", "99999-01-01", "7:", "1e3"):
        with pytest.raises(ConfigError, match="is no place in a topic"):
            target_of(text, now)


def test_properties() -> None:
    assert pairs_of(["a=b", "c=", "a=b"]) == {"a": "b", "c": ""}
    with pytest.raises(ConfigError, match="given twice"):
        pairs_of(["a=b", "a=c"])
    with pytest.raises(ConfigError, match="write key=value"):
        pairs_of(["=b"])


async def test_steps_are_told_now_and_then() -> None:
    clock, stream = ManualClock(), io.StringIO()
    steps = Steps(clock, "deleted", 1000, stream)
    steps.at(1)
    await clock.advance(5)
    steps.at(500)
    steps.end()
    assert stream.getvalue() == "deleted 500 of 1,000\n"


def test_a_drain_ends_well_though_its_progress_cannot_be_seen(run: Run) -> None:
    asked: list[str] = []
    still_asked = threading.Event()

    class Answers(BaseHTTPRequestHandler):
        """A broker that is too busy to say what it owns, after the first time."""

        def do_GET(self) -> None:
            asked.append(self.path)
            is_owned = self.path.endswith("/ownedNamespaces")
            count = len([path for path in asked if path.endswith("/ownedNamespaces")])
            self._answer(503 if is_owned and count > 1 else 200, b"{}" if is_owned else b'["standalone"]')
            if count > 2:  # the first refusal has been taken in, and did not end the asking
                still_asked.set()

        def do_POST(self) -> None:
            self._answer(204 if still_asked.wait(20) else 500, b"")

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("content-type", "application/json")
            if status != 204:
                self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("localhost", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        outcome = run("brokers", "drain", "busy:1", "--url", f"http://localhost:{server.server_port}")
        server.shutdown()
        thread.join()
    assert (outcome.code, outcome.out, outcome.err) == (0, "done: brokers drain (broker busy:1)\n", "")
