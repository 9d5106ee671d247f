"""The `braid` command: what it accepts and how it ends. The work is in one module per command, imported when it runs.

Exit codes: 0 done, 1 refused or failed, 2 wrong use (options, settings), 3 not finished in time, 130 interrupted. An error is
one line on standard error, never a traceback.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from braid import __version__
from braid.errors import BraidError, ConfigError, DeadlineExceeded

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_TIMEOUT = 3
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="braid",
    help="Braid: a message-streaming platform that speaks the Pulsar protocol.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Url = Annotated[str, typer.Option("--url", envvar="BRAID_URL", help="Where the broker is.")]
Output = Annotated[str, typer.Option("--output", help="text or json (one object per line).")]
DEFAULT_URL = "pulsar://localhost:6650"


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
    advertised_address: Annotated[
        str | None, typer.Option("--advertised-address", help="Host name told to clients, if not the one listened on.")
    ] = None,
    max_message_size: Annotated[int | None, typer.Option("--max-message-size", help="Largest message in bytes.")] = None,
    config: Annotated[Path | None, typer.Option("--config", help="TOML file with settings.")] = None,
    log_level: Annotated[str | None, typer.Option("--log-level", help="debug, info, warning or error.")] = None,
) -> None:
    """Run a durable broker in one process until SIGTERM or SIGINT."""
    from braid.cli.standalone import run

    broker = {
        "bind_address": host,
        "port": port,
        "http_port": http_port,
        "advertised_address": advertised_address,
        "max_message_size": max_message_size,
    }
    flags: dict[str, dict[str, Any]] = {"broker": broker, "storage": {"data_dir": data_dir}, "log": {"level": log_level}}
    run(config, {section: {k: v for k, v in values.items() if v is not None} for section, values in flags.items()})


def main() -> None:
    """Entry point: runs the command and turns every expected failure into one line and an exit code."""
    try:
        app(standalone_mode=True)
    except ConfigError as error:
        _fail(error, EXIT_USAGE)
    except DeadlineExceeded as error:
        _fail(error, EXIT_TIMEOUT)
    except BraidError as error:
        _fail(error, EXIT_FAILED)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)


def _fail(error: BraidError, code: int) -> None:
    typer.echo(f"error: {' '.join(error.message.split())}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
