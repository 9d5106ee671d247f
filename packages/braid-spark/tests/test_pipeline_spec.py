"""Pipeline files: what they may say, and one sentence with the line for everything else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.errors import ConfigError
from braid_spark.pipeline import build
from braid_spark.pipeline.spec import Pipeline, load, parse

GOOD = """\
name: revenue
source:
  options:
    topic: topic://public/default/orders
    startingOffsets: earliest
    maxMessagesPerTrigger: 1000
transform:
  sql: SELECT __key, value FROM source
sink:
  format: parquet
  options: {path: out/revenue}
trigger: {every: 10s}
checkpoint: state/revenue
spark:
  conf:
    spark.master: local[2]
"""
FILE = Path("pipes/revenue.yaml")


def read(text: str, file: Path = FILE) -> Pipeline:
    return parse(text.encode(), file)


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read(text)
    return caught.value.message


def test_a_whole_file() -> None:
    made = read(GOOD)
    assert made.name == "revenue"
    assert (made.source.format, made.source.options["maxMessagesPerTrigger"]) == ("braid", "1000")
    assert made.source.lines["startingOffsets"] == 5
    assert made.sql == "SELECT __key, value FROM source" and made.function is None
    assert made.every_ms == 10_000 and not made.is_available_now
    assert made.conf == {"spark.master": "local[2]"}


def test_relative_paths_mean_the_directory_of_the_file(tmp_path: Path) -> None:
    made = read(GOOD, tmp_path / "revenue.yaml")
    assert made.checkpoint == str(tmp_path / "state/revenue")
    assert made.sink.options["path"] == str(tmp_path / "out/revenue")


def test_paths_with_a_scheme_and_absolute_ones_stay() -> None:
    assert read(GOOD.replace("state/revenue", "s3a://bucket/state")).checkpoint == "s3a://bucket/state"
    assert read(GOOD.replace("state/revenue", "/state")).checkpoint == "/state"


def test_the_name_is_the_files_if_none_is_given() -> None:
    assert read(GOOD.replace("name: revenue\n", "")).name == "revenue"
    assert read(GOOD.replace("name: revenue\n", ""), Path("billing.yaml")).name == "billing"


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [("500ms", 500), ("10s", 10_000), ("10 seconds", 10_000), ("1.5 s", 1500), ("2m", 120_000), ("1 hour", 3_600_000)],
)
def test_times(text: str, milliseconds: int) -> None:
    assert read(GOOD.replace("10s", text)).every_ms == milliseconds


def test_values_stay_as_they_are_written() -> None:
    made = read(GOOD.replace("earliest", "2026-01-01").replace("1000", "1e3"))
    assert made.source.options["startingOffsets"] == "2026-01-01"
    assert made.source.options["maxMessagesPerTrigger"] == "1e3"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("trigger:", "triger:"), "line 12: unknown key 'triger' in the pipeline; did you mean 'trigger'?"),
        (("  sql:", "  sqll:"), "line 8: unknown key 'sqll' in transform; did you mean 'sql'?"),
        (("every: 10s", "availablenow: true"), "line 12: unknown key 'availablenow' in trigger; did you mean 'availableNow'?"),
        (("format: parquet", "format: parqet"), "line 10: unknown format 'parqet' of sink; did you mean 'parquet'?"),
        (("every: 10s", "every: soon"), "line 12: every of trigger must be a time such as 500ms, 10s or 5m, not 'soon'."),
        (("every: 10s", "every: 10"), "line 12: every of trigger must be a time such as 500ms, 10s or 5m, not '10'."),
        (("every: 10s", "availableNow: maybe"), "line 12: availableNow of trigger must be true or false, not 'maybe'."),
        (("every: 10s", "every: 10s, availableNow: true"), "line 12: trigger must have either every or availableNow"),
        (("checkpoint: state/revenue", "checkpoint:"), "line 13: checkpoint has no value."),
        (("checkpoint: state/revenue\n", ""), "line 1: the pipeline has no checkpoint; say where to keep its position"),
        (("{path: out/revenue}", "{}"), "line 10: sink is files of format parquet and has no path; set it under 'options'."),
        (("SELECT __key, value FROM source", "[a, b]"), "line 8: sql of transform must be one value; write a list or JSON"),
        (("  sql: SELECT __key, value FROM source", "  python: shapes"), "python of transform must be module:function, not"),
        (("    startingOffsets", "    topic"), "line 5: 'topic' stands twice in options of source."),
        (("    startingOffsets", "    Topic"), "line 5: 'Topic' and 'topic' in options of source are the same to Spark."),
        (("spark.master", "master"), "line 16: 'master' in conf of spark is no setting of Spark; those begin with 'spark.'."),
        (("{every: 10s}", "soon"), "line 12: trigger must be a mapping with every, availableNow."),
        (("earliest", "!!python/object:os.system x"), "line 5: the tag 'tag:yaml.org,2002:python/object:os.system' is not"),
        (("local[2]", "'"), "line 17: this is not YAML: found unexpected end of stream."),
        (("name: revenue", "name: [1"), "this is not YAML: "),
        (("name: revenue", "---\na: b\n---"), "this is not YAML: but found another document."),
    ],
)
def test_what_is_refused(change: tuple[str, str], said: str) -> None:
    assert change[0] in GOOD
    message = refusal(GOOD.replace(*change))
    assert message.startswith("pipes/revenue.yaml, line ") and said in message, message
    assert "\n" not in message


def test_files_that_are_none(tmp_path: Path) -> None:
    assert refusal("").startswith("pipes/revenue.yaml is empty; a pipeline has name, source, ")
    assert "must be a mapping" in refusal("- a\n- b\n")
    with pytest.raises(ConfigError, match=r"missing\.yaml cannot be read: No such file or directory\.$"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match=r"cannot be read: Is a directory\.$"):
        load(tmp_path)
    (tmp_path / "binary").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"it is not UTF-8 text \(byte 6\)\.$"):
        load(tmp_path / "binary")
    (tmp_path / "large").write_bytes(b"#" * (2 << 20))
    with pytest.raises(ConfigError, match="larger than 1,048,576 bytes"):
        load(tmp_path / "large")
    (tmp_path / "deep").write_bytes(b"[" * 100_000)
    with pytest.raises(ConfigError):
        load(tmp_path / "deep")


@given(st.text(max_size=200) | st.from_regex(r"(source|sink|name|trigger): ?[\[{&*!|>'\"-]?.{0,30}\n", fullmatch=True))
def test_any_text_is_a_pipeline_or_refused(text: str) -> None:
    try:
        read(text)
    except ConfigError as error:
        assert "\n" not in error.message or "\n" in text


def test_options_are_judged_with_their_line() -> None:
    made = read(GOOD.replace("startingOffsets: earliest", "startingOfsets: earliest"))
    with pytest.raises(
        ConfigError, match=r"revenue.yaml, line 5: source: There is no option startingOfsets .* startingOffsets\?"
    ):
        build.check_options(made, "pulsar://localhost:6650")
    made = read(GOOD.replace("maxMessagesPerTrigger: 1000", "maxMessagesPerTrigger: many"))
    with pytest.raises(ConfigError, match=r"line 6: source: The option maxMessagesPerTrigger = 'many' cannot be used"):
        build.check_options(made, "pulsar://localhost:6650")


def test_the_address_of_the_command_is_for_what_names_none() -> None:
    made = read(GOOD)
    assert build.with_url(made.source, "pulsar://there:6650")["service.url"] == "pulsar://there:6650"
    assert "service.url" not in build.with_url(made.sink, "pulsar://there:6650")
    for spelling in ("service.url", "SERVICE.URL", "kafka.bootstrap.servers"):
        mine = read(GOOD.replace("startingOffsets: earliest", f"{spelling}: pulsar://here:6650"))
        assert "pulsar://there:6650" not in build.with_url(mine.source, "pulsar://there:6650").values()


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("shapes:shout", None),
        ("shapes:made", None),
        ("shapes:shuot", "the module 'shapes' has no function 'shuot'; did you mean 'shout'?"),
        ("shape:shout", "there is no module 'shape', neither in"),
        ("broken:shout", "line 1: "),
        ("json:loads", None),
        ("os.nothing:x", "there is no module 'os.nothing'"),
    ],
)
def test_functions_are_found_without_running_anything(
    function: str, said: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.delitem(sys.modules, "shapes", raising=False)  # another file's, of a test that ran before
    (tmp_path / "shapes.py").write_text("raise SystemExit\ndef shout(df): return df\nmade = shout\n")
    (tmp_path / "broken.py").write_text("def shout(:\n")
    made = read(GOOD.replace("sql: SELECT __key, value FROM source", f"python: {function}"), tmp_path / "revenue.yaml")
    if said is None:
        build.check_function(made)
        return
    with pytest.raises(ConfigError) as caught:
        build.check_function(made)
    assert said in caught.value.message


def test_settings_of_a_local_session_stay_on_this_machine() -> None:
    assert build.settings(read(GOOD))["spark.driver.bindAddress"] == "127.0.0.1"
    remote = build.settings(read(GOOD.replace("local[2]", "spark://host:7077")))
    assert "spark.driver.bindAddress" not in remote and remote["spark.app.name"] == "revenue"
