"""The reference pages `settings.md` and `cli.md`, written from the declarations in the code, so that they cannot be wrong."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import typer.main

from braid.runtime.config import describe
from braid.web.config import StandaloneConfig


def write(folder: Path) -> list[Path]:
    """Write both pages into `folder`; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    pages = {"settings.md": settings_page(), "cli.md": cli_page()}
    for name, text in pages.items():
        (folder / name).write_text(text)
    return [folder / name for name in pages]


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
    from braid.cli.main import app

    root = typer.main.get_command(app)
    lines = ["# Commands", "", "Generated from the code. Errors are one line on standard error; `--help` works everywhere.", ""]
    lines += ["Exit codes: 0 done, 1 refused or failed, 2 wrong use, 3 not finished in time, 130 interrupted."]
    for name, command in sorted(getattr(root, "commands", {}).items()):
        if not command.hidden:
            lines += _command(name, command)
    return "\n".join(lines) + "\n"


def _command(name: str, command: Any) -> Iterator[str]:
    arguments = [each.name.upper() for each in command.params if each.param_type_name == "argument"]
    yield from ("", f"## braid {' '.join([name, *arguments])}", "", command.help or "", "")
    yield from ("| option | default | meaning |", "|---|---|---|")
    for each in command.params:
        names = f"`{each.name.upper()}`" if each.param_type_name == "argument" else " ".join(f"`{opt}`" for opt in each.opts)
        shown = "" if each.default is None or each.required else f"`{each.default}`"
        yield f"| {names} | {shown} | {_plain(each.help or '')} |"
    if command.epilog:
        yield from ("", command.epilog)


def _plain(text: str) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")
