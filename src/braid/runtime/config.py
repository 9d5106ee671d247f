"""Settings: from a TOML file, then the environment (`BRAID__SECTION__KEY`), then flags; later ones win.

Owns reading, merging and checking. A component declares a frozen `msgspec.Struct` whose fields carry bounds and a description
(`setting`); the reference page is generated from the same declarations. An unknown key is an error that says where the setting
belongs, or names the nearest known one. Pulsar's spelling of a setting is accepted as an alias where it means the same.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from braid.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)
ENV_PREFIX = "BRAID__"
ENVIRONMENT = "the environment"
NEAR = 0.7
"""How alike two spellings are before one is taken for a slip of the other; less guesses at random."""


class SettingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One setting as the reference page shows it."""

    section: str
    key: str
    type_name: str
    default: object
    description: str
    bounds: str
    alias: str


def setting(description: str, *, ge: float | None = None, le: float | None = None, alias: str = "") -> msgspec.Meta:
    """Annotation of a settings field: what it means, its bounds, and Pulsar's name for it (several are divided by commas)."""
    return msgspec.Meta(description=description, ge=ge, le=le, extra={"alias": alias} if alias else None)


def load(config: type[C], file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Mapping[str, Any]]) -> C:
    """Build the settings object `config`, whose fields are sections. `flags` is section -> key -> value."""
    merged: dict[str, dict[str, Any]] = {}
    if file is not None:
        _merge(config, merged, _read_toml(file), f"file {file}")
    _merge(config, merged, _from_environment(config, environ), ENVIRONMENT)
    _merge(config, merged, flags, "the command line")
    try:
        return msgspec.convert(merged, config, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explain(config, str(exc), merged)) from exc


def describe(config: type[msgspec.Struct]) -> Iterator[SettingInfo]:
    """Every setting of `config`, section by section, in declaration order."""
    for section, struct in _sections(config).items():
        hints = get_type_hints(struct, include_extras=True)
        for field in msgspec.structs.fields(struct):
            inner, meta = _split(hints[field.name])
            low = "" if meta.ge is None else f">= {meta.ge:g}"
            high = "" if meta.le is None else f"<= {meta.le:g}"
            yield SettingInfo(
                section=section,
                key=field.name,
                type_name=" or ".join(_choices(inner)) or getattr(inner, "__name__", str(inner)),
                default=field.default,
                description=meta.description or "",
                bounds=", ".join(part for part in (low, high) if part),
                alias=(meta.extra or {}).get("alias", ""),
            )


def _split(hint: Any) -> tuple[Any, msgspec.Meta]:
    if get_origin(hint) is Annotated:
        inner, *metas = get_args(hint)
        for meta in metas:
            if isinstance(meta, msgspec.Meta):
                return inner, meta
        return inner, msgspec.Meta()
    return hint, msgspec.Meta()


def _sections(config: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    return dict(get_type_hints(config))


def _read_toml(file: Path) -> Mapping[str, Any]:
    try:
        with file.open("rb") as stream:
            return tomllib.load(stream)
    except OSError as exc:
        raise ConfigError(f"The settings file {file} cannot be read: {exc.strerror}.") from exc
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as exc:
        raise ConfigError(f"The settings file {file} is not valid TOML: {exc}.") from exc


def _from_environment(config: type[msgspec.Struct], environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in environ.items():
        if name.upper().startswith(ENV_PREFIX):
            section, separator, key = name[len(ENV_PREFIX) :].lower().partition("__")
            if not separator or not key:
                hint = _whereabouts(config, section, ENVIRONMENT) or f"Write {ENV_PREFIX}SECTION__KEY."
                raise ConfigError(f"The environment variable {name} names no setting. {hint}")
            found.setdefault(section, {})[key] = value
    return found


def _merge(config: type[msgspec.Struct], merged: dict[str, dict[str, Any]], source: Mapping[str, Any], origin: str) -> None:
    sections = _sections(config)
    for section, values in source.items():
        if section not in sections:
            raise ConfigError(_unknown_section(config, section, isinstance(values, Mapping), origin))
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{section}] in {origin} must be a table of settings, not {values!r}.")
        names = _names(sections[section])
        given: dict[str, str] = {}
        target = merged.setdefault(section, {})
        for key, value in values.items():
            name = names.get(key) or names.get(key.lower())
            if name is None:
                hint = _whereabouts(config, key, origin, section) or f"Known: {', '.join(sorted(set(names.values())))}."
                raise ConfigError(f"Unknown setting {section}.{key} in {origin}. {hint}")
            if name in given:
                raise ConfigError(
                    f"The setting {section}.{name} stands twice in {origin}, as {given[name]} and as {key}; keep one."
                )
            if isinstance(value, str) and "\0" in value:
                raise ConfigError(f"The setting {section}.{name} in {origin} contains a NUL character; remove it.")
            given[name] = key
            target[name] = value


def _names(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Accepted spellings of each setting: its own name, and Pulsar's in its own and in lower case."""
    hints = get_type_hints(struct, include_extras=True)
    names: dict[str, str] = {}
    for field in msgspec.structs.fields(struct):
        names[field.name] = field.name
        _inner, meta = _split(hints[field.name])
        for alias in filter(None, (meta.extra or {}).get("alias", "").split(", ")):
            names[alias] = field.name
            names[alias.lower()] = field.name
    return names


class _Place(NamedTuple):
    """Where a setting belongs."""

    section: str
    name: str

    def shown(self, origin: str) -> str:
        if origin == ENVIRONMENT:
            return f"{ENV_PREFIX}{self.section.upper()}__{self.name.upper()}"
        return f"{self.name} in section [{self.section}]"


def _whereabouts(config: type[msgspec.Struct], given: str, origin: str, section: str = "") -> str:
    """A sentence on where a misplaced key belongs or what a misspelt one may mean; "" if nothing is alike. `section` is the
    one it was written in: the nearest name there comes first."""
    places: dict[str, list[_Place]] = {}
    for known, struct in _sections(config).items():
        for spelling, name in _names(struct).items():
            places.setdefault(spelling.lower(), []).append(_Place(known, name))
    wanted = given.lower()
    exact = places.get(wanted)
    if exact is not None:
        return f"Write {' or '.join(dict.fromkeys(place.shown(origin) for place in exact))}."
    here = [spelling for spelling, found in places.items() if any(place.section == section for place in found)]
    for spellings in (here, list(places)):
        if near := difflib.get_close_matches(wanted, spellings, n=1, cutoff=NEAR):
            found = places[near[0]]
            place = next((place for place in found if place.section == section), found[0])
            is_here = place.section == section and origin != ENVIRONMENT
            return f"Did you mean {place.name if is_here else place.shown(origin)}?"
    return ""


def _unknown_section(config: type[msgspec.Struct], given: str, is_table: bool, origin: str) -> str:
    """The message about a name at the top level; what is no table was probably meant as a setting."""
    sections = _sections(config)
    if not is_table:
        hint = _whereabouts(config, given, origin) or f"The sections are {', '.join(sorted(sections))}."
        return f"{given} in {origin} stands outside of any section. {hint}"
    near = difflib.get_close_matches(given.lower(), sections, n=1, cutoff=NEAR)
    hint = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(sorted(sections))}."
    return f"Unknown section [{given}] in {origin}. {hint}"


def _choices(inner: Any) -> tuple[str, ...]:
    """The values of a setting that takes only these."""
    return tuple(str(choice) for choice in get_args(inner)) if get_origin(inner) is Literal else ()


def _explain(config: type[msgspec.Struct], text: str, merged: Mapping[str, Mapping[str, Any]]) -> str:
    """Turn msgspec's message into one that names the setting, the value given and, if they are few, the values allowed."""
    reason, _, path = text.partition(" - at `$.")
    section, _, key = path.rstrip("`").partition(".")
    if not key:
        return f"Bad settings: {reason}."
    value = merged.get(section, {}).get(key)
    inner, _meta = _split(get_type_hints(_sections(config)[section], include_extras=True).get(key))
    if choices := ("true", "false") if inner is bool else _choices(inner):
        reason = f"it must be one of {', '.join(choices)}"
        near = difflib.get_close_matches(str(value).lower(), choices, n=1, cutoff=NEAR)
        reason += f"; did you mean {near[0]}?" if near else "."
        return f"The setting {section}.{key} = {value!r} cannot be used: {reason}"
    return f"The setting {section}.{key} = {value!r} cannot be used: {reason}."
