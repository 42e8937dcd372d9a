"""Configuration files: what is read, what is refused and how, and that the schema agrees."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tensortap.errors import OptionError
from tensortap.monitoring import config
from tensortap.monitoring.config import (
    Config,
    MonitorConfig,
    Reread,
    WatchConfig,
    read_config,
)
from tensortap.monitoring.config_keys import KEYS
from tensortap.monitoring.rules import Rules
from tensortap.taps.session import TapWarning

ROOT = Path(__file__).resolve().parents[2]
SCHEMA = json.loads((ROOT / "docs" / "monitor.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

DOCUMENT = {
    "monitor_layers": {
        "transformer.encoder.layers.0.self_attn": {
            "alias": "attention_weights",
            "record_type": "single",
        },
        "transformer.encoder.layers.0.cross_attn": {
            "alias": "cross_attention",
            "record_type": "epoch_full",
        },
    },
    "monitor_epochs": [1, 5, 10, 20],
}

EVERYTHING: dict[str, Any] = {
    "learning_rate": 3e-4,
    "model": {"monitor_this": "a user's own"},
    "monitor_layers": ["blocks.0", "blocks.*.attn"],
    "monitor_epochs": [1, 5],
    "monitor_batches": [0, 10],
    "monitor_output_dir": "outputs",
    "monitor_save_format": "npy",
    "monitor_sample_every": 4,
    "monitor_memory_limit": 1 << 30,
    "watch_layers": ["blocks", "!blocks.0"],
    "watch_every": 10,
    "watch_outputs": True,
    "watch_grads": False,
    "watch_params": True,
    "watch_updates": "sampled",
    "watch_rules": {"nan": "raise", "blocks\\..*: dead > 0.9": "warn"},
    "watch_path": "runs/train",
    "watch_ring": 5,
}

TOML = """
learning_rate = 3e-4
monitor_layers = ["blocks.0", "blocks.*.attn"]
monitor_epochs = [1, 5]
monitor_batches = [0, 10]
monitor_output_dir = "outputs"
monitor_save_format = "npy"
monitor_sample_every = 4
monitor_memory_limit = 1073741824
watch_layers = ["blocks", "!blocks.0"]
watch_every = 10
watch_outputs = true
watch_grads = false
watch_params = true
watch_updates = "sampled"
watch_path = "runs/train"
watch_ring = 5

[watch_rules]
nan = "raise"
'blocks\\..*: dead > 0.9' = "warn"

[model]
monitor_this = "a user's own"
"""

needs_toml = pytest.mark.skipif(
    not any(importlib.util.find_spec(name) for name in ("tomllib", "tomli")),
    reason="no reader of TOML",
)


def write(path: Path, data: object) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_the_documents_own_file(tmp_path: Path) -> None:
    found = read_config(write(tmp_path / "config.json", DOCUMENT))
    assert found.monitor == MonitorConfig(DOCUMENT["monitor_layers"], [1, 5, 10, 20])
    assert found.watch == WatchConfig()


def test_every_key_is_read(tmp_path: Path) -> None:
    found = read_config(write(tmp_path / "config.json", EVERYTHING))
    for part in ("monitor", "watch"):
        for each in fields(getattr(found, part)):
            value = getattr(getattr(found, part), each.name)
            assert value == EVERYTHING[f"{part}_{each.name}"], each.name
    assert read_config(EVERYTHING) == found
    assert Rules(found.watch.rules or ()).needs_now


def test_the_keys_are_the_fields_and_those_of_the_schema() -> None:
    parts = {"monitor": MonitorConfig, "watch": WatchConfig}
    names = [f"{part}_{each.name}" for part, kind in parts.items() for each in fields(kind)]
    assert list(KEYS) == list(SCHEMA["properties"]) == names


def test_null_is_as_if_it_were_not_said() -> None:
    assert read_config(dict.fromkeys(KEYS)) == Config()
    layers = {"a": {"alias": None, "record_type": None, "leaf": 0}, "b": None}
    assert read_config({"monitor_layers": layers}).monitor.layers == {"a": {"leaf": 0}, "b": {}}


@needs_toml
def test_toml_says_the_same(tmp_path: Path) -> None:
    assert read_config(write(tmp_path / "config.toml", TOML)) == read_config(EVERYTHING)


@needs_toml
def test_toml_with_a_name_that_is_not_quoted(tmp_path: Path) -> None:
    path = write(tmp_path / "c.toml", '[monitor_layers.blocks.0]\nalias = "x"')
    with pytest.raises(OptionError, match=r"the layer 'blocks' of 'monitor_layers' .* is quoted"):
        read_config(path)
    path = write(tmp_path / "c.toml", '[monitor_layers."blocks.0"]\nalias = "x"')
    assert read_config(path).monitor.layers == {"blocks.0": {"alias": "x"}}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (
            {"monitor_epoch": [1]},
            "'monitor_epoch' in FILE is not known. Did you mean monitor_epochs",
        ),
        ({"watch_evry": 1}, "Did you mean watch_every"),
        ({"monitor_path": "x"}, "'monitor_path' in FILE is not known"),
        ({"monitor_epochs": 3}, "'monitor_epochs' must be a list of whole numbers from 0"),
        ({"monitor_epochs": []}, "and not empty, got []"),
        ({"monitor_epochs": [1, "2"]}, "got [1, '2']"),
        ({"monitor_batches": [True]}, "'monitor_batches' must be a list of whole numbers"),
        ({"monitor_layers": "blocks"}, "must be a list of layers, or an object"),
        ({"monitor_layers": {"a": 3}}, "the layer 'a' of 'monitor_layers' must be an object"),
        ({"monitor_layers": {"a": {"kind": 3}}}, "an object with alias, record_type and leaf"),
        (
            {"monitor_layers": {"a": {"record_type": "full"}}},
            "the record_type of the layer 'a' of 'monitor_layers' must be \"single\" or "
            "\"epoch_full\", got 'full'",
        ),
        ({"monitor_save_format": "pkl"}, '"pt" or "npy", got \'pkl\''),
        ({"watch_every": 0}, "'watch_every' must be a whole number from 1, got 0"),
        ({"watch_every": 2.5}, "a whole number from 1, got 2.5"),
        ({"watch_grads": 1}, "'watch_grads' must be true or false, got 1"),
        ({"watch_updates": "some"}, "'watch_updates' must be true, false or \"sampled\""),
        ({"watch_rules": ["grad_nrom > 3"]}, "'watch_rules': The rule 'grad_nrom > 3'"),
        ({"watch_rules": {"nan": "rise"}}, "Did you mean 'raise'?"),
        ({"watch_rules": "nan"}, "a list of rules, or an object from rules to actions"),
        ({"watch_layers": []}, "a pattern or a list of patterns"),
        ([1], "must be an object with keys, got list"),
        ("{", "is no JSON"),
        ("", "is no JSON"),
        ('{"a": "\ud800"}'.encode("utf-8", "surrogatepass"), "is no JSON"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_what_is_wrong_is_said_with_the_file_and_the_key(
    tmp_path: Path, data: object, said: str
) -> None:
    path = tmp_path / "config.json"
    if isinstance(data, bytes):
        path.write_bytes(data)
    else:
        write(path, data)
    with pytest.raises(OptionError) as error:
        read_config(path)
    assert said.replace("FILE", str(path)) in str(error.value)
    assert str(path) in str(error.value)


def test_a_source_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read: No such file"):
        read_config(tmp_path / "none.json")
    with pytest.raises(OptionError, match="cannot be read: it is a folder, not a regular file"):
        read_config(tmp_path)
    with pytest.raises(OptionError, match="neither JSON nor TOML by its name"):
        read_config(write(tmp_path / "config.yaml", "{}"))
    with pytest.raises(OptionError, match="or a mapping; got 3"):
        read_config(3)  # type: ignore[arg-type]


def test_toml_where_nothing_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"^Reading TOML on Python 3.10 needs tomli"):
        read_config(write(tmp_path / "config.toml", TOML))


# The schema and the reader take the same files.

ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 3)
    | st.sampled_from([1.0, 2.5, -1.0])
    | st.sampled_from(["", "pt", "npy", "single", "epoch_full", "sampled", "blocks", "nan", "warn"])
)
LAYERS = st.dictionaries(
    st.sampled_from(["a", "b.c"]),
    ATOMS | st.dictionaries(st.sampled_from(["alias", "record_type", "leaf", "x"]), ATOMS),
    max_size=2,
)
RULES = st.dictionaries(
    st.sampled_from(["nan", "loss > 1", "a.*: dead > 0.5"]),
    st.sampled_from(["raise", "warn", "snapshot", "stop", None, 1]),
    max_size=2,
)
RULE_LISTS = st.lists(st.sampled_from(["nan", "loss > 1 -> raise", 3, None]), max_size=2)
ANY = ATOMS | st.lists(ATOMS, max_size=3) | st.lists(st.integers(0, 9), max_size=3) | LAYERS
NAMES = [*KEYS, "watch_rule", "monitor_", "watch_x", "watches", "lr", "monitor_path"]


@st.composite
def files(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(NAMES), max_size=4, unique=True))
    return {
        name: draw(
            RULES | RULE_LISTS | ATOMS.filter(lambda v: v is None) if name == "watch_rules" else ANY
        )
        for name in names
    }


@given(files())
@settings(max_examples=600, deadline=None)
def test_the_schema_takes_what_the_reader_takes(data: dict[str, Any]) -> None:
    data = json.loads(json.dumps(data))
    try:
        found = read_config(data)
    except OptionError:
        assert not VALIDATOR.is_valid(data), data
    else:
        assert isinstance(found, Config)
        assert VALIDATOR.is_valid(data), (data, list(VALIDATOR.iter_errors(data)))


@pytest.mark.parametrize("key", [*KEYS, "lr"])
@given(value=ANY | RULES | RULE_LISTS)
@settings(max_examples=60, deadline=None)
def test_the_schema_takes_each_key_as_the_reader_does(key: str, value: Any) -> None:
    data = {key: json.loads(json.dumps(value))}
    told = data[key]
    if key == "watch_rules" and isinstance(told, list | dict):
        texts = [text for text in told if isinstance(text, str)]
        if not all(text in ("nan", "loss > 1", "loss > 1 -> raise") for text in texts):
            return  # what a rule may say is the reader's alone to know
    try:
        read_config(data)
    except OptionError:
        assert not VALIDATOR.is_valid(data), data
    else:
        assert VALIDATOR.is_valid(data), (data, list(VALIDATOR.iter_errors(data)))


def test_the_schema_is_one_and_takes_the_examples() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    for data in (DOCUMENT, EVERYTHING, {}):
        VALIDATOR.validate(data)


def test_the_examples_on_the_page_are_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "rules.md").read_text()
    found = []
    for language in ("json", "toml"):
        for number, block in enumerate(re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)):
            if language == "toml" and not needs_toml.args[0]:
                found.append(read_config(write(tmp_path / f"{number}.toml", block)))
            elif language == "json":
                found.append(read_config(write(tmp_path / f"{number}.json", block)))
    assert len(found) >= 1 and all(each.watch.rules for each in found)
    for rule in re.findall(r"^\| `([^`]+)` \|", page.split("## Metrics")[0], re.MULTILINE):
        Rules([rule])


# Change while running.


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def changed(path: Path, data: object, age: float = 10.0) -> None:
    """Write a file that looks as if it had been written a while ago."""
    write(path, data)
    changed.count += 1  # type: ignore[attr-defined]
    then = time.time() - age + changed.count / 100  # type: ignore[attr-defined]
    os.utime(path, (then, then))


changed.count = 0  # type: ignore[attr-defined]


def test_a_changed_file_is_seen_a_second_later(tmp_path: Path) -> None:
    path, clock = tmp_path / "config.json", Clock()
    changed(path, {"watch_every": 10})
    reread = Reread(path, clock=clock)
    assert reread.config.every == 10
    assert reread.changed() is None
    changed(path, {"watch_every": 20})
    clock.now += 0.5
    assert reread.changed() is None
    clock.now += 0.5
    found = reread.changed()
    assert found is not None and found.every == 20 and reread.config == found
    clock.now += 5
    assert reread.changed() is None
    changed(path, {"watch_every": 20, "lr": 3})  # nothing of ours
    clock.now += 5
    assert reread.changed() is None


def test_an_unchanged_file_is_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = tmp_path / "config.json", Clock()
    changed(path, {"watch_every": 10})
    reread = Reread(path, clock=clock)
    reads: list[Path] = []
    read = config.read_regular
    monkeypatch.setattr(config, "read_regular", lambda p, n: reads.append(p) or read(p, n))
    for _ in range(5):
        clock.now += 1
        assert reread.changed() is None
    assert not reads
    changed(path, {"watch_every": 3})
    clock.now += 1
    assert reread.changed() is not None and len(reads) == 1


def test_a_change_within_the_same_tick_of_the_file_system_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    now = time.time()
    write(path, {"watch_every": 10})
    os.utime(path, (now, now))
    reread = Reread(path, every=0.0)
    write(path, {"watch_every": 20})
    os.utime(path, (now, now))  # same time, same size
    found = reread.changed()
    assert found is not None and found.every == 20


def test_a_file_that_is_just_being_written_is_left_for_later(tmp_path: Path) -> None:
    path, clock = tmp_path / "config.json", Clock()
    changed(path, {"watch_every": 10})
    reread = Reread(path, clock=clock)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(path, '{"watch_every"')  # now
        clock.now += 1
        assert reread.changed() is None
        changed(path, {"watch_every": 30})
        clock.now += 1
        found = reread.changed()
    assert found is not None and found.every == 30


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ('{"watch_every": 1', "is no JSON"),
        ({"watch_every": 0}, "'watch_every' must be a whole number"),
        ({"watch_evry": 3}, "Did you mean watch_every"),
        ({"watch_rules": ["nan ->"]}, "'watch_rules': The rule"),
        (None, "cannot be read"),
    ],
)
def test_trouble_is_said_once_and_a_mended_file_is_taken(
    tmp_path: Path, trouble: object, said: str
) -> None:
    path, clock = tmp_path / "config.json", Clock()
    changed(path, {"watch_every": 10})
    reread = Reread(path, clock=clock)
    if trouble is None:
        path.unlink()
    else:
        changed(path, trouble)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for _ in range(4):
            clock.now += 1
            assert reread.changed() is None
    assert [warning.category for warning in heard] == [TapWarning]
    assert said in str(heard[0].message) and "Training runs on" in str(heard[0].message)
    assert reread.config.every == 10
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        changed(path, {"watch_every": 30})
        clock.now += 1
        found = reread.changed()
    assert found is not None and found.every == 30


def test_what_is_wrong_at_the_start_raises(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        Reread(tmp_path / "none.json")
