"""Settings: file, environment, flags, in that order; a mistake names the key, the value and the nearest known name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
import pytest

from braid.errors import ConfigError
from braid.runtime.config import describe, load, setting


class Engine(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[engine]`."""

    max_size: Annotated[int, setting("Largest size", ge=1, le=100, alias="maxSize")] = 10
    name: Annotated[str, setting("Its name")] = "x"
    is_fast: Annotated[bool, setting("Whether it is fast")] = False
    colour: Annotated[Literal["red", "green"], setting("Its colour")] = "red"


class Wheels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Section `[wheels]`."""

    spokes: Annotated[int, setting("How many each has", ge=3, alias="numberOfSpokes")] = 32
    name: Annotated[str, setting("Their name")] = "y"


class Root(msgspec.Struct, frozen=True, kw_only=True):
    engine: Engine = Engine()
    wheels: Wheels = Wheels()


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
        ("[engine]\nzzzzz = 2\n", r"Known: colour, is_fast, max_size, name\.$"),
        ("[zzzzz]\nspokes = 2\n", r"Unknown section \[zzzzz\] in file .*Known: engine, wheels\.$"),
        ("[engine]\nmaxSise = 2\n", r"Did you mean max_size\?$"),
        ("[engine]\nspokes = 4\n", r"Unknown setting engine\.spokes in file .*Write spokes in section \[wheels\]\.$"),
        ("[engine]\nnumberOfSpokes = 4\n", r"Write spokes in section \[wheels\]\.$"),
        ("[engine]\nspoke = 4\n", r"Did you mean spokes in section \[wheels\]\?$"),
        ("spokes = 4\n", r"^spokes in file .* stands outside of any section\. Write spokes in section \[wheels\]\.$"),
        ("maxSize = 4\n", r"outside of any section\. Write max_size in section \[engine\]\.$"),
        ("max_sise = 4\n", r"outside of any section\. Did you mean max_size in section \[engine\]\?$"),
        ("name = 4\n", r"Write name in section \[engine\] or name in section \[wheels\]\.$"),
        ("zzzzz = 4\n", r"outside of any section\. The sections are engine, wheels\.$"),
        ("[engine]\nmax_size = 2\nmaxSize = 3\n", r"engine\.max_size stands twice .* as max_size and as maxSize; keep one"),
        ('[engine]\nname = "a\\u0000b"\n', r"engine\.name in file .* contains a NUL character"),
        ('[engine]\ncolour = "blue"\n', r"engine\.colour = 'blue' cannot be used: it must be one of red, green\.$"),
        ('[engine]\ncolour = "GREEN"\n', r"it must be one of red, green; did you mean green\?$"),
        ("[engine]\ncolour = 3\n", r"engine\.colour = 3 cannot be used: it must be one of red, green\.$"),
        ('[engine]\nis_fast = "yes"\n', r"engine\.is_fast = 'yes' cannot be used: it must be one of true, false\.$"),
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


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("BRAID__SPOKES", r"BRAID__SPOKES names no setting\. Write BRAID__WHEELS__SPOKES\.$"),
        ("BRAID__NUMBEROFSPOKES", r"Write BRAID__WHEELS__SPOKES\.$"),
        ("BRAID__SPOKE", r"Did you mean BRAID__WHEELS__SPOKES\?$"),
        ("BRAID__ZZZZZ", r"Write BRAID__SECTION__KEY\.$"),
        ("BRAID__ENGINE__NUMBEROFSPOKES", r"in the environment\. Write BRAID__WHEELS__SPOKES\.$"),
        ("BRAID__ENGINE__MAX_SISE", r"in the environment\. Did you mean BRAID__ENGINE__MAX_SIZE\?$"),
        ("BRAID__WEELS__SPOKES", r"Unknown section \[weels\] in the environment\. Did you mean wheels\?$"),
        ("BRAID__ENGINE__COLOUR", r"engine\.colour = '1' cannot be used: it must be one of red, green\.$"),
    ],
)
def test_mistakes_in_the_environment_are_named_as_variables(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(Root, None, {name: "1"}, {})


def test_settings_describe_themselves() -> None:
    found = {each.key: each for each in describe(Root) if (each.section, each.key) != ("wheels", "name")}
    assert list(found) == ["max_size", "name", "is_fast", "colour", "spokes"]
    assert (found["max_size"].type_name, found["max_size"].default) == ("int", 10)
    assert (found["max_size"].bounds, found["max_size"].alias) == (">= 1, <= 100", "maxSize")
    assert found["name"].description == "Its name"
    assert (found["is_fast"].type_name, found["colour"].type_name) == ("bool", "red or green")
