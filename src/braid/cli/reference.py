"""The reference pages, written from the code itself so that they cannot be wrong.

`settings.md`, `cli.md` and `errors.md` come from declarations; `rest.md` and `metrics.md` from a broker started in memory for
the purpose. `make check` compares the committed pages with fresh ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import httpx
import typer.main
from typer.core import TyperGroup

from braid.broker.config import BrokerConfig
from braid.errors import BraidError
from braid.runtime.config import describe
from braid.web.config import StandaloneConfig, StorageConfig
from braid.web.standalone import Standalone

COMMON_OPTIONS = ("--url", "--output", "--timeout")
"""Of every admin command: described once."""


def pages() -> dict[str, str]:
    """File name and text of every page."""
    schema, exposition = asyncio.run(_live())
    return {
        "settings.md": settings_page(),
        "cli.md": cli_page(),
        "errors.md": errors_page(),
        "rest.md": rest_page(schema),
        "metrics.md": metrics_page(exposition),
    }


def write(folder: Path) -> list[Path]:
    """Write the pages into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    written = pages()
    for name, text in written.items():
        (folder / name).write_text(text)
    return [folder / name for name in written]


def stale(folder: Path) -> list[Path]:
    """The pages in `folder` that are not what the code says."""
    return [
        folder / name for name, text in pages().items() if not (folder / name).exists() or (folder / name).read_text() != text
    ]


async def _live() -> tuple[Any, str]:
    """The OpenAPI document and the metrics of a broker with one topic and one subscription."""
    config = StandaloneConfig(
        broker=BrokerConfig(port=0, http_port=0, bind_address="127.0.0.1"),
        storage=StorageConfig(metadata_backend="memory", ledger_backend="memory"),
    )
    async with Standalone(config) as broker, httpx.AsyncClient(base_url=broker.http_url) as http:
        topic = "/admin/v2/persistent/public/default/example"
        (await http.put(topic)).raise_for_status()
        (await http.put(f"{topic}/subscription/example")).raise_for_status()
        return (await http.get("/openapi/openapi.json")).json(), (await http.get("/metrics")).text


def rest_page(schema: Any) -> str:
    """Every admin call of the OpenAPI document."""
    lines = ["# Admin REST", "", "Generated from the OpenAPI document that the broker serves at `/openapi/openapi.json`.", ""]
    lines += ['Errors are JSON, `{"reason": "..."}`. Everything else of Pulsar\'s admin API answers 501 or 405 for now.', ""]
    lines += ["| method | path | what it does | success |", "|---|---|---|---|"]
    for path, methods in sorted(schema["paths"].items()):
        for method, call in sorted(methods.items()):
            what = _plain(call.get("description") or call.get("summary") or "")
            success = " ".join(code for code in call["responses"] if code.startswith("2"))
            lines.append(f"| {method.upper()} | `{path}` | {what} | {success} |")
    return "\n".join(lines) + "\n"


def metrics_page(exposition: str) -> str:
    """Every metric of the broker's own (not those of the Python process)."""
    lines = ["# Metrics", "", "Generated from a broker's `/metrics`. Names are Pulsar's where Pulsar has the same thing.", ""]
    lines += ["| metric | type | meaning |", "|---|---|---|"]
    kinds = {line.split()[2]: line.split()[3] for line in exposition.splitlines() if line.startswith("# TYPE ")}
    for line in exposition.splitlines():
        if line.startswith(("# HELP pulsar_", "# HELP braid_")):
            _, _, name, text = line.split(" ", 3)
            lines.append(f"| `{name}` | {kinds[name]} | {_plain(text)} |")
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Every error a client or administrator can meet."""
    lines = [
        "# Errors",
        "",
        "Generated from the code. `code` is Pulsar's `ServerError` on the wire, `status` the HTTP status.",
        "",
    ]
    lines += ["| error | code | status | may be retried | meaning |", "|---|---|---|---|---|"]
    seen: list[type[BraidError]] = []
    pending: list[type[BraidError]] = [BraidError]
    while pending:
        error = pending.pop(0)
        if error.__module__ == BraidError.__module__:
            seen.append(error)
        pending[:0] = error.__subclasses__()
    for error in dict.fromkeys(seen):
        doc = (vars(error).get("__doc__") or "").strip().split("\n")[0]
        lines.append(f"| `{error.__name__}` | {error.code} | {error.status} | {error.advice.value} | {_plain(doc)} |")
    return "\n".join(lines) + "\n"


def settings_page() -> str:
    """Every setting of `braid standalone`."""
    lines = [
        "# Settings",
        "",
        "Generated from the code. A setting comes from a TOML file (`--config`), then the environment (`BRAID__SECTION__KEY`),",
        "then flags; later ones win. Pulsar's name of a setting is accepted too.",
    ]
    for section, settings in groupby(describe(StandaloneConfig), key=lambda each: each.section):
        lines += [
            "",
            f"## [{section}]",
            "",
            "| setting | type | default | bounds | Pulsar's name | meaning |",
            "|---|---|---|---|---|---|",
        ]
        for each in settings:
            cells = (f"`{each.key}`", _plain(each.type_name), f"`{each.default}`", each.bounds, each.alias, each.description)
            lines.append(f"| {' | '.join(_plain(cell) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def cli_page() -> str:
    """Every command with its options."""
    from braid.cli.commands import app

    root = typer.main.get_command(app)
    lines = ["# Commands", "", "Generated from the code. Errors are one line on standard error; `--help` works everywhere.", ""]
    lines += ["Exit codes: 0 done, 1 refused or failed, 2 wrong use, 3 not finished in time, 130 interrupted."]
    for name, command in sorted(getattr(root, "commands", {}).items()):
        if command.hidden:
            continue
        if not isinstance(command, TyperGroup):
            lines += _command(f"## braid {name}", command)
            continue
        lines += ["", f"## braid {name}", "", command.help or "", ""]
        lines += [
            f"Every command below also has {', '.join(f'`{each}`' for each in COMMON_OPTIONS)}; see `braid {name} --help`."
        ]
        context: Any = typer.Context(command)
        for verb in command.list_commands(context):
            lines += _command(f"### braid {name} {verb}", command.get_command(context, verb), COMMON_OPTIONS)
    return "\n".join(lines) + "\n"


def _command(title: str, command: Any, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    arguments = [each.name.upper() for each in command.params if each.param_type_name == "argument"]
    yield from ("", " ".join([title, *arguments]), "", command.help or "")
    shown = [each for each in command.params if not set(each.opts) & set(leave_out)]
    if shown:
        yield from ("", "| option | default | meaning |", "|---|---|---|")
    for each in shown:
        names = f"`{each.name.upper()}`" if each.param_type_name == "argument" else " ".join(f"`{opt}`" for opt in each.opts)
        known = each.show_default if isinstance(each.show_default, str) else each.default
        default = "" if known in (None, []) or each.required else f"`{known}`"
        yield f"| {names} | {default} | {_plain(each.help or '')} |"
    if command.epilog:
        yield from ("", command.epilog)


def _plain(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
