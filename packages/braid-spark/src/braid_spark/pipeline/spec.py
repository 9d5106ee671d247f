"""What a pipeline file says: YAML into a checked `Pipeline`, every complaint with its line.

Reads the file and nothing else: no Spark, no broker, and no object is ever made from what a tag in the file names. Relative
paths mean the file's own directory, so that a pipeline has one checkpoint wherever it is started from.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import msgspec
import yaml

from braid.errors import ConfigError

KEYS = ("name", "source", "transform", "sink", "trigger", "checkpoint", "spark")
SOURCES = ("braid", "parquet", "json", "csv", "orc", "text", "rate", "rate-micro-batch")
SINKS = ("braid", "parquet", "json", "csv", "orc", "text", "console", "noop")
FILE_FORMATS = ("parquet", "json", "csv", "orc", "text")
MAX_FILE_BYTES = 1 << 20
_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000}
_WORDS = {"millisecond": "ms", "second": "s", "sec": "s", "minute": "m", "min": "m", "hour": "h"}
_CORE_TAGS = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float", "bool", "null", "timestamp", "seq", "map")}
_NULL = "tag:yaml.org,2002:null"
_FUNCTION = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


class Endpoint(msgspec.Struct, frozen=True):
    """A source or a sink, as Spark wants it."""

    format: str
    options: dict[str, str]
    lines: dict[str, int]
    """Of each option, where it stands in the file."""
    schema: str | None = None


class Pipeline(msgspec.Struct, frozen=True, kw_only=True):
    """One pipeline, complete and plausible."""

    file: Path
    name: str
    source: Endpoint
    sink: Endpoint
    sql: str | None = None
    function: str | None = None
    """`module:function`, which is given the source's data frame and returns the sink's."""
    every_ms: int | None = None
    is_available_now: bool = False
    checkpoint: str
    conf: dict[str, str]


def load(file: Path) -> Pipeline:
    """The pipeline in `file`; raises ConfigError with file and line."""
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"The pipeline file {file} cannot be read: {error.strerror or error}.") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{file} is no pipeline file: it is larger than {MAX_FILE_BYTES:,} bytes.")
    return parse(data, file)


def parse(data: bytes, file: Path) -> Pipeline:
    """The pipeline that `data` describes; `file` is what errors call it and where relative paths start."""
    reader = _Reader(file)
    root = reader.compose(data)
    top = reader.mapping(root, "the pipeline", KEYS)
    for key, why in (("source", "what to read"), ("sink", "where to write"), ("checkpoint", "where to keep its position")):
        if key not in top:
            reader.fail(root, f"the pipeline has no {key}; say {why} under {key!r}")
    name = reader.text(top["name"], "name") if "name" in top else file.stem
    sql, function = reader.transform(top["transform"]) if "transform" in top else (None, None)
    every_ms, is_available_now = reader.trigger(top["trigger"]) if "trigger" in top else (None, False)
    return Pipeline(
        file=file,
        name=name,
        source=reader.endpoint(top["source"], "source", SOURCES),
        sink=reader.endpoint(top["sink"], "sink", SINKS),
        sql=sql,
        function=function,
        every_ms=every_ms,
        is_available_now=is_available_now,
        checkpoint=absolute(reader.text(top["checkpoint"], "checkpoint"), file),
        conf=reader.conf(top["spark"]) if "spark" in top else {},
    )


def absolute(path: str, file: Path) -> str:
    """A path as the file means it; one with a scheme (`s3a://...`) is left alone."""
    return path if re.match(r"[A-Za-z][\w+.-]*:", path) else str(file.resolve().parent / path)


def nearest(given: str, known: Iterable[str]) -> str:
    """The end of a sentence that complains about a name."""
    names = list(known)
    found = difflib.get_close_matches(given.lower(), [each.lower() for each in names], n=1, cutoff=0.6)
    if found:
        return f"did you mean {next(each for each in names if each.lower() == found[0])!r}?"
    return f"known are {', '.join(names)}"


class _Reader:
    """Walks the nodes of one file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def fail(self, node: yaml.Node | int, text: str) -> NoReturn:
        line = node if isinstance(node, int) else node.start_mark.line + 1
        raise ConfigError(f"{self._file}, line {line}: {text}{'' if text.endswith('?') else '.'}")

    def compose(self, data: bytes) -> yaml.Node:
        try:
            root: yaml.Node | None = yaml.compose(data.decode(), Loader=yaml.SafeLoader)
        except UnicodeDecodeError as error:
            raise ConfigError(f"{self._file} is no pipeline file: it is not UTF-8 text (byte {error.start}).") from error
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self.fail(1 if mark is None else mark.line + 1, f"this is not YAML: {error.problem or error.context}")
        except yaml.YAMLError as error:
            raise ConfigError(f"{self._file} is no pipeline file: {' '.join(str(error).split())}.") from error
        except RecursionError:
            raise ConfigError(f"{self._file} is no pipeline file: it is nested too deeply.") from None
        if root is None:
            raise ConfigError(f"{self._file} is empty; a pipeline has {', '.join(KEYS)}.")
        return root

    def mapping(self, node: yaml.Node, what: str, known: tuple[str, ...] | None) -> dict[str, yaml.Node]:
        """The entries of a mapping, each name once, and only `known` ones if that is given."""
        self._tag(node)
        if not isinstance(node, yaml.MappingNode):
            expected = f" with {', '.join(known)}" if known else " of names and values"
            self.fail(node, f"{what} must be a mapping{expected}")
        found: dict[str, yaml.Node] = {}
        for key_node, value in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.fail(key_node, f"a name in {what} must be plain text")
            key = key_node.value
            if known is not None and key not in known:
                self.fail(key_node, f"unknown key {key!r} in {what}; {nearest(key, known)}")
            if key in found:
                self.fail(key_node, f"{key!r} stands twice in {what}")
            found[key] = value
        return found

    def text(self, node: yaml.Node, what: str) -> str:
        """A scalar as it is written; numbers and true or false are text to Spark as well."""
        self._tag(node)
        if not isinstance(node, yaml.ScalarNode):
            self.fail(node, f"{what} must be one value; write a list or JSON as text in quotes")
        if node.tag == _NULL or not node.value.strip():
            self.fail(node, f"{what} has no value")
        value: str = node.value
        if "\0" in value:
            self.fail(node, f"{what} holds a NUL character")
        return value

    def texts(self, node: yaml.Node, what: str) -> tuple[dict[str, str], dict[str, int]]:
        """Names and values, with their lines. Names that differ in case alone would be one to Spark."""
        values: dict[str, str] = {}
        lines: dict[str, int] = {}
        seen: dict[str, str] = {}
        for key, value in self.mapping(node, what, None).items():
            if key.lower() in seen:
                self.fail(value, f"{key!r} and {seen[key.lower()]!r} in {what} are the same to Spark")
            seen[key.lower()] = key
            values[key] = self.text(value, f"{key} in {what}")
            lines[key] = value.start_mark.line + 1
        return values, lines

    def endpoint(self, node: yaml.Node, what: str, formats: tuple[str, ...]) -> Endpoint:
        keys = ("format", "options", "schema") if what == "source" else ("format", "options")
        entries = self.mapping(node, what, keys)
        chosen = "braid"
        if "format" in entries:
            chosen = self.text(entries["format"], f"format of {what}")
            # Others may be known to the session, by jars or packages of its own: those are for Spark to judge.
            if chosen not in formats and difflib.get_close_matches(chosen.lower(), formats, n=1, cutoff=0.7):
                self.fail(entries["format"], f"unknown format {chosen!r} of {what}; {nearest(chosen, formats)}")
        options, lines = self.texts(entries["options"], f"options of {what}") if "options" in entries else ({}, {})
        if chosen in FILE_FORMATS:
            path = next((key for key in options if key.lower() == "path"), None)
            if path is None:
                self.fail(node, f"{what} is files of format {chosen} and has no path; set it under 'options'")
            options[path] = absolute(options[path], self._file)
        schema = self.text(entries["schema"], f"schema of {what}") if "schema" in entries else None
        return Endpoint(chosen, options, lines, schema)

    def transform(self, node: yaml.Node) -> tuple[str | None, str | None]:
        entries = self.mapping(node, "transform", ("sql", "python"))
        if len(entries) != 1:
            self.fail(node, "transform must have either sql or python, one of them")
        if "sql" in entries:
            return self.text(entries["sql"], "sql of transform"), None
        function = self.text(entries["python"], "python of transform")
        if not _FUNCTION.fullmatch(function):
            self.fail(entries["python"], f"python of transform must be module:function, not {function!r}")
        return None, function

    def trigger(self, node: yaml.Node) -> tuple[int | None, bool]:
        entries = self.mapping(node, "trigger", ("every", "availableNow"))
        if len(entries) != 1:
            self.fail(node, "trigger must have either every or availableNow, one of them")
        if "every" in entries:
            return self._duration(entries["every"]), False
        flag = self.text(entries["availableNow"], "availableNow of trigger").lower()
        if flag not in ("true", "false"):
            self.fail(entries["availableNow"], f"availableNow of trigger must be true or false, not {flag!r}")
        return None, flag == "true"

    def conf(self, node: yaml.Node) -> dict[str, str]:
        entries = self.mapping(node, "spark", ("conf",))
        if "conf" not in entries:
            return {}
        conf, lines = self.texts(entries["conf"], "conf of spark")
        for key in conf:
            if not key.startswith("spark."):
                self.fail(lines[key], f"{key!r} in conf of spark is no setting of Spark; those begin with 'spark.'")
        return conf

    def _duration(self, node: yaml.Node) -> int:
        text = self.text(node, "every of trigger")
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-z]+)", text.strip().lower())
        unit = None if match is None else _WORDS.get(match[2].removesuffix("s") or "s", match[2])
        if match is None or unit not in _UNITS:
            self.fail(node, f"every of trigger must be a time such as 500ms, 10s or 5m, not {text!r}")
        return round(float(match[1]) * _UNITS[unit])

    def _tag(self, node: yaml.Node) -> None:
        if node.tag not in _CORE_TAGS:
            self.fail(node, f"the tag {node.tag!r} is not allowed here; write plain values")
