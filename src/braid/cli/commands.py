"""The commands of `braid` and what each accepts. The work is in one module per command, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from braid import __version__
from braid.cli.admin_groups import DEFAULT_URL as DEFAULT_ADMIN_URL
from braid.cli.admin_groups import HELP_OPTIONS, NOUNS, Timeout, group
from braid.cli.admin_groups import Url as AdminUrl
from braid.cli.plugins import RootCommands
from braid.errors import ConfigError

app = typer.Typer(
    name="braid",
    cls=RootCommands,
    help="Braid: a message-streaming platform that speaks the Pulsar protocol.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings=HELP_OPTIONS,
)

Url = Annotated[str, typer.Option("--url", envvar="BRAID_URL", help="Where the broker is.")]
Output = Annotated[str, typer.Option("--output", help="text or json (one object per line).")]
DEFAULT_URL = "pulsar://localhost:6650"
TOPIC_HELP = "Topic, such as orders, persistent://tenant/namespace/orders or topic://tenant/namespace/orders."


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"braid {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    pass


@app.command(
    epilog="Example: braid standalone --data-dir ./data --port 6650 --http-port 8080. "
    "Every setting can also come from a TOML file (--config) and from the environment: "
    "BRAID__BROKER__MAX_MESSAGE_SIZE=1048576. See the settings reference for all of them."
)
def standalone(
    data_dir: Annotated[str | None, typer.Option("--data-dir", help="Directory for all data; made if missing.")] = None,
    host: Annotated[str | None, typer.Option("--host", help="Address or host name to listen on.")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port of the binary protocol; 0 = any free one.")] = None,
    http_port: Annotated[int | None, typer.Option("--http-port", help="Port of REST and metrics; 0 = any free one.")] = None,
    brokers: Annotated[int | None, typer.Option("--brokers", help="Brokers in this process, over one store.")] = None,
    advertised_address: Annotated[
        str | None, typer.Option("--advertised-address", help="Host name told to clients, if not the one listened on.")
    ] = None,
    max_message_size: Annotated[int | None, typer.Option("--max-message-size", help="Largest message in bytes.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")] = None,
    log_level: Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")] = None,
) -> None:
    """Run a durable broker, or several, in one process until SIGTERM, SIGINT or SIGHUP."""
    from braid.cli.standalone import run

    broker = {
        "bind_address": host,
        "port": port,
        "http_port": http_port,
        "count": brokers,
        "advertised_address": advertised_address,
        "max_message_size": max_message_size,
    }
    flags: dict[str, dict[str, Any]] = {"broker": broker, "storage": {"data_dir": data_dir}, "log": {"level": log_level}}
    run(config, {section: {k: v for k, v in values.items() if v is not None} for section, values in flags.items()})


@app.command(
    epilog="Example: braid produce orders --messages 1000 --size 200. "
    "Lines from a file or a pipe: seq 10 | braid produce orders --file -. "
    "Ctrl-C stops sending and waits for what is under way; a second one does not wait."
)
def produce(
    topic: Annotated[str, typer.Argument(help=TOPIC_HELP)],
    messages: Annotated[int | None, typer.Option("--messages", "-n", min=1, help="Messages to send.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Send each line of this file; - is standard input.")] = None,
    text: Annotated[str | None, typer.Option("--text", "-m", help="Payload of every message.")] = None,
    size: Annotated[int, typer.Option("--size", min=0, max=128 << 20, help="Bytes of generated payloads.")] = 100,
    rate: Annotated[float, typer.Option("--rate", min=0, help="Messages per second; 0 = as fast as possible.")] = 0,
    key: Annotated[str | None, typer.Option("--key", help="Key of every message; {i} becomes its number.")] = None,
    batch: Annotated[int, typer.Option("--batch", min=1, max=100_000, help="Messages in one batch; 1 = no batches.")] = 100,
    compression: Annotated[str, typer.Option("--compression", help="none, lz4, zlib, zstd or snappy.")] = "none",
    url: Url = DEFAULT_URL,
    output: Output = "text",
) -> None:
    """Send messages to a topic and report how many are durable."""
    from braid.cli.produce import ProduceOptions, run

    options = ProduceOptions(
        topic=topic,
        messages=messages,
        file=file,
        text=text,
        size=size,
        rate=rate,
        key=key,
        batch=batch,
        compression=_one_of("--compression", compression, ("none", "lz4", "zlib", "zstd", "snappy")),
        url=url,
        is_json=_is_json(output),
    )
    run(options)


@app.command(
    epilog="Example: braid consume orders --subscription audit --from earliest --count 10 --output json. "
    "Payloads go to standard output, one per line, and are acknowledged then; progress goes to standard error. "
    "Ctrl-C ends it; that is exit code 130 only if --count was not reached."
)
def consume(
    topic: Annotated[str, typer.Argument(help=TOPIC_HELP)],
    subscription: Annotated[str, typer.Option("--subscription", "-s", help="Name of the subscription; made if missing.")],
    type: Annotated[
        str, typer.Option("--type", help="exclusive, shared or failover; a scalable topic is read in order unless shared.")
    ] = "exclusive",
    start: Annotated[str, typer.Option("--from", help="Where a new subscription starts: earliest or latest.")] = "latest",
    count: Annotated[int | None, typer.Option("--count", "-n", min=1, help="Stop after so many messages.")] = None,
    timeout: Annotated[
        float | None, typer.Option("--timeout", min=0, help="Stop if no message comes for so many seconds.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Count only, show no payloads.")] = False,
    url: Url = DEFAULT_URL,
    output: Output = "text",
) -> None:
    """Receive and acknowledge messages of a subscription."""
    from braid.cli.consume import ConsumeOptions, run

    options = ConsumeOptions(
        topic=topic,
        subscription=subscription,
        type=_one_of("--type", type, ("exclusive", "shared", "failover")),
        initial=_one_of("--from", start, ("earliest", "latest")),
        count=count,
        timeout=timeout,
        is_quiet=quiet,
        url=url,
        is_json=_is_json(output),
    )
    run(options)


@app.command(
    epilog="Example: braid top --sort backlog. For a script: braid top --once --output json. "
    "Rates are measured between two looks; a topic's backlog is the sum over its subscriptions, in entries. Ctrl-C ends it."
)
def top(
    interval: Annotated[float, typer.Option("--interval", min=0.1, max=3600, help="Seconds between two looks.")] = 2.0,
    sort: Annotated[str, typer.Option("--sort", help="in, out, backlog, size or topic.")] = "in",
    rows: Annotated[int, typer.Option("--rows", min=1, max=10_000, help="Topics to show, at most.")] = 20,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Only topics of this namespace.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look twice, show that, and end.")] = False,
    url: AdminUrl = DEFAULT_ADMIN_URL,
    output: Output = "text",
    timeout: Timeout = 30.0,
) -> None:
    """Watch the topics and brokers of a cluster: rates, backlog, owners."""
    from braid.cli.top import TopOptions, run

    options = TopOptions(
        interval=interval,
        sort=_one_of("--sort", sort, ("in", "out", "backlog", "size", "topic")),
        rows=rows,
        namespace=namespace,
        is_once=once,
        url=url,
        is_json=_is_json(output),
        timeout=timeout,
    )
    run(options)


for _noun in NOUNS:
    app.add_typer(group(_noun))


@app.command(hidden=True)
def reference(
    folder: Annotated[Path, typer.Argument(help="Where the reference pages are.")],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a page is not what the code says.")] = False,
) -> None:
    """Write the reference pages from the declarations in the code."""
    from braid.cli.reference import stale, write

    if not check:
        for path in write(folder):
            typer.echo(str(path))
    elif old := stale(folder):
        raise ConfigError(f"{', '.join(map(str, old))} must be written anew: run `make docs`.")


def _one_of(option: str, given: str, known: tuple[str, ...]) -> str:
    if given.lower() not in known:
        raise ConfigError(f"{option} must be one of {', '.join(known)}, not {given!r}.")
    return given.lower()


def _is_json(output: str) -> bool:
    return _one_of("--output", output, ("text", "json")) == "json"
