"""Settings: from a TOML file, then the environment (`BRAID__SECTION__KEY`), then flags; later ones win.

Owns reading, merging and checking. A component declares a frozen `msgspec.Struct` whose fields carry bounds and a description
(`setting`); the reference page is generated from the same declarations. Unknown keys are errors with the nearest known name.
Pulsar's spelling of a setting is accepted as an alias where it means the same.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from braid.errors import ConfigError

C = TypeVar("C", bound=msgspec.Struct)
ENV_PREFIX = "BRAID__"


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
    """Annotation of a settings field: what it means, its bounds, and Pulsar's name for it."""
    return msgspec.Meta(description=description, ge=ge, le=le, extra={"alias": alias} if alias else None)


def load(config: type[C], file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Mapping[str, Any]]) -> C:
    """Build the settings object `config`, whose fields are sections. `flags` is section -> key -> value."""
    merged: dict[str, dict[str, Any]] = {}
    if file is not None:
        _merge(config, merged, _read_toml(file), f"file {file}")
    _merge(config, merged, _from_environment(environ), "the environment")
    _merge(config, merged, flags, "the command line")
    try:
        return msgspec.convert(merged, config, strict=False)
    except msgspec.ValidationError as exc:
        raise ConfigError(_explain(str(exc), merged)) from exc


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
                type_name=getattr(inner, "__name__", str(inner)),
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


def _from_environment(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name, value in environ.items():
        if name.upper().startswith(ENV_PREFIX):
            section, separator, key = name[len(ENV_PREFIX) :].lower().partition("__")
            if not separator or not key:
                raise ConfigError(f"The environment variable {name} names no setting; write {ENV_PREFIX}SECTION__KEY.")
            found.setdefault(section, {})[key] = value
    return found


def _merge(config: type[msgspec.Struct], merged: dict[str, dict[str, Any]], source: Mapping[str, Any], origin: str) -> None:
    sections = _sections(config)
    for section, values in source.items():
        if section not in sections:
            raise ConfigError(_unknown(f"section [{section}]", section, sections, origin))
        if not isinstance(values, Mapping):
            raise ConfigError(f"[{section}] in {origin} must be a table of settings, not {values!r}.")
        names = _names(sections[section])
        target = merged.setdefault(section, {})
        for key, value in values.items():
            name = names.get(key) or names.get(key.lower())
            if name is None:
                raise ConfigError(_unknown(f"setting {section}.{key}", key, names, origin))
            target[name] = value


def _names(struct: type[msgspec.Struct]) -> dict[str, str]:
    """Accepted spellings of each setting: its own name, and Pulsar's in its own and in lower case."""
    hints = get_type_hints(struct, include_extras=True)
    names: dict[str, str] = {}
    for field in msgspec.structs.fields(struct):
        names[field.name] = field.name
        _inner, meta = _split(hints[field.name])
        if alias := (meta.extra or {}).get("alias", ""):
            names[alias] = field.name
            names[alias.lower()] = field.name
    return names


def _unknown(what: str, given: str, known: Mapping[str, Any], origin: str) -> str:
    near = difflib.get_close_matches(given.lower(), list(known), n=1)
    hint = f" Did you mean {near[0]}?" if near else f" Known: {', '.join(sorted(known))}."
    return f"Unknown {what} in {origin}.{hint}"


def _explain(text: str, merged: Mapping[str, Mapping[str, Any]]) -> str:
    """Turn msgspec's message into one that names the setting and the value given."""
    reason, _, path = text.partition(" - at `$.")
    section, _, key = path.rstrip("`").partition(".")
    value = merged.get(section, {}).get(key)
    return f"The setting {section}.{key} = {value!r} cannot be used: {reason}." if key else f"Bad settings: {text}."
