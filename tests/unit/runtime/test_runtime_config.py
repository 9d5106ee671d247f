"""Settings: file, environment, flags, in that order; a mistake names the key, the value and the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from braid.errors import ConfigError
from braid.runtime.config import describe, load, setting


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine]`."""

    max_size: Annotated[int, setting("Largest size", ge=1, le=100, alias="maxSize")] = 10
    name: Annotated[str, setting("Its name")] = "x"
    is_fast: Annotated[bool, setting("Whether it is fast")] = False


class Root(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine = Engine()


def test_later_sources_win(tmp_path: Path) -> None:
    file = tmp_path / "braid.toml"
    file.write_text('[engine]\nmax_size = 2\nname = "file"\n')
    config = load(Root, file, {"BRAID__ENGINE__MAX_SIZE": "3", "OTHER": "1"}, {"engine": {"is_fast": True}})
    assert config.engine == Engine(max_size=3, name="file", is_fast=True)
    assert load(Root, file, {"BRAID__ENGINE__MAX_SIZE": "3"}, {"engine": {"max_size": 4}}).engine.max_size == 4


def test_pulsars_spelling_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "braid.toml"
    file.write_text("[engine]\nmaxSize = 7\n")
    assert load(Root, file, {}, {}).engine.max_size == 7
    assert load(Root, None, {"BRAID__ENGINE__MAXSIZE": "8"}, {}).engine.max_size == 8


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[engine]\nmax_sise = 2\n", r"Unknown setting engine\.max_sise in file .*Did you mean max_size\?"),
        ("[enigne]\nmax_size = 2\n", r"Unknown section \[enigne\] in file .*Did you mean engine\?"),
        ("[engine]\nzzzzz = 2\n", r"Known: .*is_fast.*max_size.*name"),
        ("engine = 3\n", r"must be a table"),
        ("[engine]\nmax_size = 0\n", r"engine\.max_size = 0 cannot be used: .*>= 1"),
        ("[engine]\nmax_size = 101\n", r"engine\.max_size = 101 cannot be used"),
        ('[engine]\nmax_size = "many"\n', r"engine\.max_size = 'many' cannot be used"),
        ("[engine\n", r"is not valid TOML"),
        (b"\xff\xfe", r"is not valid TOML"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str | bytes, reason: str) -> None:
    file = tmp_path / "braid.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=reason):
        load(Root, file, {}, {})


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Root, tmp_path / "missing.toml", {}, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        load(Root, tmp_path, {}, {})


def test_a_variable_without_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="BRAID__ENGINE names no setting"):
        load(Root, None, {"BRAID__ENGINE": "1"}, {})


def test_settings_describe_themselves() -> None:
    found = {each.key: each for each in describe(Root)}
    assert list(found) == ["max_size", "name", "is_fast"]
    assert (found["max_size"].type_name, found["max_size"].default) == ("int", 10)
    assert (found["max_size"].bounds, found["max_size"].alias) == (">= 1, <= 100", "maxSize")
    assert found["name"].description == "Its name"
