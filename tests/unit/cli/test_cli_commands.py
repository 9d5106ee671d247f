"""`braid produce` and `braid consume` as a user runs them, and how every command ends when something is wrong."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from braid import __version__
from braid.cli import main as cli
from braid.cli.progress import Progress
from braid.cli.reference import cli_page, settings_page, stale, write
from braid.testing.broker import BackgroundBroker
from braid.testing.clock import ManualClock


@pytest.fixture(scope="module")
def broker() -> Iterator[BackgroundBroker]:
    with BackgroundBroker() as running:
        yield running


class Outcome:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err


Run = Callable[..., Outcome]


@pytest.fixture
def braid(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    def run(*arguments: str) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["braid", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        sys.stdout.flush()
        seen = capfdbinary.readouterr()
        assert b"Traceback" not in seen.err
        return Outcome(int(ended.value.code or 0), seen.out.decode(), seen.err.decode())

    return run


def test_lines_go_in_and_come_out(braid: Run, broker: BackgroundBroker, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text("one\ntwo\nthree\n")
    sent = braid("produce", "lines", "--file", str(lines), "--key", "k{i}", "--url", broker.service_url)
    assert sent.code == 0
    assert "sent 3 messages" in sent.err
    got = braid("consume", "lines", "-s", "s", "--from", "earliest", "--count", "3", "--url", broker.service_url)
    assert (got.code, got.out) == (0, "one\ntwo\nthree\n")
    assert "received 3 messages" in got.err


def test_generated_messages_as_json(braid: Run, broker: BackgroundBroker) -> None:
    url = broker.service_url
    empty = braid("consume", "gen", "-s", "s", "--count", "1", "--timeout", "0.01", "--url", url)
    assert empty.code == cli.EXIT_TIMEOUT
    assert empty.err.endswith("error: Only 0 of 1 messages came from persistent://public/default/gen.\n")
    sent = braid("produce", "gen", "-n", "100", "--size", "7", "--batch", "10", "--output", "json", "--url", url)
    summary = json.loads(sent.out)
    assert (summary["messages"], summary["bytes"], summary["topic"]) == (100, 700, "persistent://public/default/gen")
    got = braid("consume", "gen", "-s", "s", "--count", "100", "--output", "json", "--url", url)
    events = [json.loads(line) for line in got.out.splitlines()]
    assert [event["sequence_id"] for event in events[:-1]] == list(range(100))
    assert {event["payload"] for event in events[:-1]} == {"0123456"}
    assert events[-1]["messages"] == 100
    done = braid("consume", "gen", "-s", "s", "--timeout", "0.01", "--url", url)
    assert (done.code, done.out) == (0, "")
    assert "received 0 messages" in done.err


def test_payloads_that_are_no_text(braid: Run, broker: BackgroundBroker, tmp_path: Path) -> None:
    raw = tmp_path / "raw"
    raw.write_bytes(b"\xff\xfe\n")
    url = broker.service_url
    braid("consume", "raw", "-s", "s", "--timeout", "0.01", "--url", url)
    braid("produce", "raw", "--file", str(raw), "--compression", "zstd", "--url", url)
    got = braid("consume", "raw", "-s", "s", "--count", "1", "--output", "json", "--type", "shared", "--url", url)
    assert json.loads(got.out.splitlines()[0])["payload_base64"] == "//4="


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["produce", "t", "--url", "pulsar://localhost:1"], 1, "Cannot connect to localhost:1"),
        (["produce", "t", "--url", "http://localhost:1"], 2, "write pulsar://host:port"),
        (["produce", "t", "--output", "xml"], 2, "--output must be one of text, json"),
        (["produce", "t", "--compression", "rar"], 2, "--compression must be one of"),
        (["produce", "t", "--messages", "0"], 2, "--messages"),
        (["produce", "t", "--file", "a", "--text", "b"], 2, "exclude each other"),
        (["consume", "t"], 2, "--subscription"),
        (["consume", "t", "-s", "s", "--type", "round"], 2, "--type must be one of"),
        (["consume", "t", "-s", "s", "--from", "middle"], 2, "--from must be one of"),
        (["standalone", "--port", "99999"], 2, "broker.port = 99999"),
        (["standalone", "--max-message-size", "1"], 2, "broker.max_message_size = 1"),
        (["standalone", "--log-level", "loud"], 2, "log.level = 'loud'"),
        (["standalone", "--config", "no-such-file.toml"], 2, "no-such-file.toml cannot be read"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_wrong_use_is_one_clear_line(braid: Run, arguments: list[str], code: int, text: str) -> None:
    outcome = braid(*arguments)
    assert outcome.code == code
    assert text in outcome.err
    assert outcome.out == ""


def test_refusals_of_the_broker(braid: Run, broker: BackgroundBroker) -> None:
    url = broker.service_url
    missing = braid("produce", "no/such/namespace", "--url", url)
    assert (missing.code, missing.err.count("\n")) == (1, 1)
    assert "no/such does not exist" in missing.err
    assert "cannot be read" in braid("produce", "t", "--file", "no-such-file", "--url", url).err


def test_settings_come_from_file_environment_and_flags(
    braid: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = tmp_path / "braid.toml"
    file.write_text("[broker]\nmaxMessagSize = 5\n")
    outcome = braid("standalone", "--config", str(file))
    assert outcome.code == 2
    assert "Did you mean max_message_size?" in outcome.err
    file.write_text("brokerServicePort = 1\n")
    outcome = braid("standalone", "--config", str(file))
    assert (outcome.code, outcome.err.count("\n")) == (2, 1)
    assert "Write port in section [broker]." in outcome.err
    file.write_text('[storage]\ndata_dir = "a\\u0000b"\n')
    assert (outcome := braid("standalone", "--config", str(file))).code == 2
    assert "contains a NUL character" in outcome.err
    assert "must be one of debug, info, warning, error" in braid("standalone", "--log-level", "verbose").err
    file.write_text("[broker\n")
    assert "not valid TOML" in braid("standalone", "--config", str(file)).err
    monkeypatch.setenv("BRAID__BROKER__KEEP_ALIVE_SECONDS", "0")
    assert "broker.keep_alive_seconds = '0'" in braid("standalone").err


def test_help_has_an_example_each(braid: Run) -> None:
    for command in ("standalone", "produce", "consume"):
        outcome = braid(command, "--help")
        assert (outcome.code, "Example: braid" in outcome.out) == (0, True)
    assert braid("--version").out == f"braid {__version__}\n"


def test_the_reference_pages_name_every_setting_and_command(tmp_path: Path) -> None:
    settings = settings_page()
    for text in ("## [broker]", "## [storage]", "## [managed_ledger]", "## [log]", "| `max_message_size` | int | `5242880` |"):
        assert text in settings
    commands = cli_page()
    assert "## braid produce TOPIC" in commands
    assert "`--http-port`" in commands
    folder = tmp_path / "reference"
    assert [path.name for path in write(folder)] == ["settings.md", "cli.md", "errors.md", "rest.md", "metrics.md"]
    assert (folder / "settings.md").read_text() == settings
    assert "| PUT | `/admin/v2/persistent/{tenant}/{namespace}/{topic}` |" in (folder / "rest.md").read_text()
    assert "`pulsar_subscription_back_log`" in (folder / "metrics.md").read_text()
    assert "| `ProducerFenced` | 25 | 409 |" in (folder / "errors.md").read_text()
    assert stale(folder) == []
    (folder / "cli.md").write_text("old")
    assert stale(folder) == [folder / "cli.md"]


async def test_progress_shows_rates_now_and_then() -> None:
    clock, stream = ManualClock(), io.StringIO()
    progress = Progress(clock, "sent", stream)
    progress.add(100)
    assert stream.getvalue() == ""
    await clock.advance(5)
    progress.add(100, 9)
    assert stream.getvalue() == "sent 10 messages, 2/s, 0.0 MB\n"
    progress.done()
    assert "sent 10 messages in 5.00 s, 2/s" in stream.getvalue()
