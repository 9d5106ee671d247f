"""Commands that other packages contribute: found late, listed, and harmless when they cannot be loaded."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable

import pytest
import typer
from typer.testing import CliRunner

from braid.cli import plugins
from braid.cli.commands import app
from braid.errors import BraidError

Install = Callable[[str, object], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Pretends that a package with this command is installed."""
    found: list[importlib.metadata.EntryPoint] = []
    monkeypatch.setattr(plugins, "entry_points", lambda group: list(found) if group == plugins.GROUP else [])

    def add(name: str, value: object) -> None:
        module = types.ModuleType(f"contributed_{name}")
        vars(module)["app"] = value
        monkeypatch.setitem(sys.modules, module.__name__, module)
        found.append(importlib.metadata.EntryPoint(name, f"{module.__name__}:app", plugins.GROUP))

    return add


def contributed() -> typer.Typer:
    made = typer.Typer(help="Makes things.", no_args_is_help=True)

    @made.command()
    def thing(count: int) -> None:
        typer.echo(f"{count} things")

    @made.command()
    def other() -> None:
        pass

    return made


def test_a_contributed_command_is_listed_and_runs(install: Install) -> None:
    install("making", contributed())
    listed = CliRunner().invoke(app, ["--help"])
    assert "making" in listed.stdout and "Makes things." in listed.stdout and "standalone" in listed.stdout
    done = CliRunner().invoke(app, ["making", "thing", "3"])
    assert (done.exit_code, done.stdout) == (0, "3 things\n")


def test_commands_of_braid_cannot_be_replaced(install: Install) -> None:
    install("produce", contributed())
    done = CliRunner().invoke(app, ["produce", "--help"])
    assert "Send messages to a topic" in done.stdout
    assert CliRunner().invoke(app, ["--help"]).stdout.count("produce") == 1


def test_one_that_is_no_command_says_so_and_the_others_work(install: Install) -> None:
    install("broken", "text")
    install("making", contributed())
    listed = CliRunner().invoke(app, ["--help"])
    assert listed.exit_code == 0 and "Cannot be loaded" in listed.stdout and "making" in listed.stdout
    done = CliRunner().invoke(app, ["broken", "run", "--with", "options"])
    assert isinstance(done.exception, BraidError)
    assert str(done.exception).startswith("The command broken comes from contributed_broken:app, which cannot be loaded: ")


def test_one_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = importlib.metadata.EntryPoint("gone", "no_such_package.command:app", plugins.GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [missing])
    done = CliRunner().invoke(app, ["gone"])
    assert isinstance(done.exception, BraidError) and "No module named 'no_such_package'" in str(done.exception)


def test_no_contributed_package_is_imported_for_a_command_of_braid(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("making", contributed())
    monkeypatch.setattr(importlib.metadata.EntryPoint, "load", lambda self: pytest.fail("loaded"))
    assert CliRunner().invoke(app, ["top", "--help"]).exit_code == 0


def test_unknown_commands_are_refused(install: Install) -> None:
    done = CliRunner().invoke(app, ["makin"])
    assert done.exit_code == 2 and "No such command" in done.output
