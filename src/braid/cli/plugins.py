"""Commands that other packages contribute, found by the entry point group `braid.commands`.

An entry point's name is the command, its value a `typer.Typer`. A package is imported when its command or the list of all is
wanted, and only then; one that cannot be imported costs its own command and no other. A command of Braid itself cannot be
replaced.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

import typer
import typer.main
from typer.core import TyperGroup

from braid.errors import BraidError, ConfigError

GROUP = "braid.commands"


class RootCommands(TyperGroup):
    """Braid's own commands and, behind them, the contributed ones."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return [*own, *sorted(set(_contributed()) - set(own))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _contributed().get(cmd_name)
        return None if entry is None else _load(entry)


def _contributed() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> Any:
    try:
        app = entry.load()
        if not isinstance(app, typer.Typer):
            raise ConfigError(f"{entry.value} is not a typer.Typer")
    except Exception as error:  # noqa: BLE001 - whatever a foreign package raises, the other commands must work
        return _broken(entry, error)
    command = typer.main.get_command(app)
    command.name = entry.name
    return command


def _broken(entry: EntryPoint, error: Exception) -> Any:
    """A command that stands in the list and says what is wrong when it is used."""
    owner = entry.dist.name if entry.dist is not None else entry.value
    text = f"{str(error).rstrip('.') or type(error).__name__}"
    stand_in = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

    @stand_in.command(
        entry.name,
        help=f"Cannot be loaded: {text}.",
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def refuse() -> None:
        raise BraidError(f"The command {entry.name} comes from {owner}, which cannot be loaded: {text}. Install {owner} anew.")

    return typer.main.get_command(stand_in)
