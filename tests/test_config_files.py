"""One line per mistake in YAML files, JSON and tables."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import Field, model_validator

from tokamake.config.fields import Settings
from tokamake.config.training import TrainSettings
from tokamake.config_files import (
    parse_json,
    parse_yaml,
    read_table,
    read_yaml,
    unknown_key,
    validate,
)
from tokamake.errors import UserError


class Inner(Settings):
    """A section."""

    stage: int = 0
    name: str = "a"

    @model_validator(mode="after")
    def _check(self) -> "Inner":
        if self.stage > 3:
            raise ValueError(f"stage: {self.stage}: give 3 or less")
        if self.name == "b":
            raise ValueError("Names do not fit")
        return self


class Outer(Settings):
    """A config."""

    size: int
    inner: Inner = Inner()
    by_name: dict[str, Inner] = Field(default_factory=dict)


@pytest.mark.parametrize(
    ("value", "lines"),
    [
        ({"siez": 1, "size": 1}, ["f: siez: unknown key; did you mean size?"]),
        ({"size": 1, "inner": {"nam": 1}}, ["f: inner.nam: unknown key; did you mean name?"]),
        (
            {"size": 1, "by_name": {"x": {"zzz": 1}}},
            ["f: by_name.x.zzz: unknown key; this section knows stage, name"],
        ),
        ({}, ["f: size: missing; add it"]),
        ({"size": "64MiB"}, ["f: size: '64MiB': a number has no unit here; write 67108864"]),
        ({"size": "2k"}, ["f: size: '2k': a number has no unit here; write 2000"]),
        (
            {"size": "x"},
            ["f: size: 'x': give an integer"],
        ),
        ({"size": 1, "inner": {"stage": 4}}, ["f: inner.stage: 4: give 3 or less"]),
        ({"size": 1, "inner": {"name": "b"}}, ["f: inner: names do not fit"]),
        ({"a": 1}, ["f: size: missing; add it", "f: a: unknown key; this section knows size, "
                    "inner, by_name"]),
    ],
)  # fmt: skip
def test_each_mistake_is_a_line_with_its_place(value: Any, lines: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        validate(Outer, value, "f")
    assert str(caught.value).splitlines() == lines


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("evaluation_interval", "evaluation_steps: 0 turns them off"),
        ("save_interval", "train_steps turns off all but the last"),
        ("log_interval", "train_steps turns off all but the first"),
    ],
)
def test_a_refused_0_says_what_turns_it_off(name: str, switch: str) -> None:
    with pytest.raises(
        UserError, match=rf"train: {name}: 0: give an integer of 1 or more .*; {switch}"
    ):
        validate(TrainSettings, {name: 0}, "train")


def test_a_key_that_is_a_number_comes_from_commas() -> None:
    with pytest.raises(UserError, match="a number is no key; quote text with commas in braces"):
        validate(Outer, {"size": 1, 98: None}, "f")


def test_json_has_the_same_messages() -> None:
    assert parse_json(Outer, '{"size": 2}', where="--settings") == Outer(size=2)
    assert parse_json(list[int], "[1, 2]", where="--sizes") == [1, 2]
    with pytest.raises(UserError, match=r"^--settings: siez: unknown key; did you mean size"):
        parse_json(Outer, '{"size": 2, "siez": 1}', where="--settings")
    with pytest.raises(UserError, match=r"^--settings: '\{': invalid JSON"):
        parse_json(Outer, "{", where="--settings")


def test_up_to_two_near_keys_are_named() -> None:
    known = ["train_steps", "train_step", "train_stops", "seed"]
    assert unknown_key("train_stepz", known) == (
        "train_stepz: unknown key; did you mean train_step or train_steps?"
    )
    assert unknown_key("x", ["a", "b"]) == "x: unknown key; this section knows a, b"


def test_a_missing_yaml_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    with pytest.raises(UserError, match=r"a\.yaml: no such file; make it$"):
        read_yaml(path, "make it")
    path.write_text("a: 1")
    assert read_yaml(path, "make it") == {"a": 1}


MISTAKES = {
    r"^a\.yaml:2: indented with a tab; YAML needs spaces": "train:\n\tsteps: 1\n",
    r"^a\.yaml:3: indented with a tab; YAML needs spaces": "train:\n  steps: 1\n\tseed: 2\n",
    r"^a\.yaml:3: steps: is in line 2, too; keep one": "train:\n  steps: 1\n  steps: 1\n",
    r"^a\.yaml:1: b: is in line 1, too; keep one": "a: [{b: 1, b: 2}]\n",
    r"^a\.yaml:2: not valid YAML \(.*\); fix this line or one before it$": "a: 1\nb: [\n",
    r"^a\.yaml:1: not valid YAML \(.*\); fix it": "a: [1]]\n",
    r"^a\.yaml:2: not valid YAML \(found undefined alias\); fix it": "a: 1\nb: *c\n",
    r"^a\.yaml: not valid YAML \(.*\); fix it": "a: \x01\n",
}


@pytest.mark.parametrize("expected", MISTAKES)
def test_mistakes_in_yaml_name_the_line_and_the_remedy(expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        parse_yaml(MISTAKES[expected], "a.yaml")


@pytest.mark.parametrize(
    "text", ["a: &x {b: 1}\nc: {<<: *x, b: 2}\nd: [*x, *x]\n", "{1: a, '1': b}", "", "a: 'x\ty'\n"]
)
def test_repeated_aliases_and_tabs_in_text_are_valid(text: str) -> None:
    parse_yaml(text, "a.yaml")


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: \xff\n")
    with pytest.raises(UserError, match=r"a\.yaml: not UTF-8; save the file as UTF-8"):
        read_yaml(tmp_path / "a.yaml", "fix it")


def table(path: Path, text: str) -> Any:
    path.write_text(text)
    return read_table(path, setting="corpora", row="corpus")


def test_a_table_keeps_line_numbers_and_leaves_out_comments_and_empty_cells(
    tmp_path: Path,
) -> None:
    read = table(tmp_path / "a.tsv", "# note\na\tb\n\n1\t\n#2\t3\n 4 \t5\n")
    assert read == (2, ["a", "b"], {4: {"a": "1"}, 6: {"a": "4", "b": "5"}})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a.tsv: no corpus; add a header and one tab-separated row per corpus"),
        ("a\tb\n", "a.tsv: no corpus; add a header and one tab-separated row per corpus"),
        (
            "a\tb\n1\n",
            "a.tsv:2: 1 column, the header has 2; separate columns with one tab, not spaces",
        ),
        (
            "a\n1\t2\n",
            "a.tsv:2: 2 columns, the header has 1; separate columns with one tab, not spaces",
        ),
    ],
)
def test_a_table_without_rows_or_with_ragged_rows_is_refused(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(UserError) as caught:
        table(tmp_path / "a.tsv", text)
    assert str(caught.value) == f"{tmp_path}/{message}"


def test_a_table_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    with pytest.raises(UserError, match=r"a\.tsv: no such file; fix corpora in the config"):
        read_table(path, setting="corpora", row="corpus")
    with pytest.raises(UserError, match="Is a directory; fix corpora in the config"):
        read_table(tmp_path, setting="corpora", row="corpus")
    path.write_bytes(b"a\tb\n\xff\t1\n")
    with pytest.raises(UserError, match=r"a\.tsv: not UTF-8; save the table as UTF-8"):
        read_table(path, setting="corpora", row="corpus")


BOMB = [
    "a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]",
    *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 11)),
]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, r":1: more than 100 levels; fix it"),
        ("a:\n  " + "- " * 3000 + "1", r":2: more than 100 levels; fix it"),
        ("seed: 2026-13-45", r"not valid YAML \(month must be in 1\.\.12\); fix it, or quote"),
        ("seed: " + "9" * 5000, r"not valid YAML \(Exceeds the limit"),
        ("seed: 0x_", r"not valid YAML \(invalid literal for int"),
        ("seed: !!timestamp foo", r"not valid YAML \(a value does not fit its tag\); fix it"),
        ("seed: !!bool foo", r"not valid YAML \(a value does not fit its tag\); fix it"),
        ("\n".join(BOMB), r"its aliases \(\*\) make more than 1,000,000 values"),
    ],
)
def test_hostile_yaml_is_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        parse_yaml(text, "x.yaml")
    assert len(str(caught.value)) < 400


def test_flat_yaml_may_be_long() -> None:
    text = "skip: [" + ", ".join(["[1, 2]"] * 3000) + "]"
    assert len(parse_yaml(text, "x.yaml")["skip"]) == 3000


def test_a_long_value_is_cut_in_a_message() -> None:
    with pytest.raises(UserError) as caught:
        validate(Outer, {"size": "x" * 10_000}, "x.yaml")
    assert len(str(caught.value)) < 400
    assert "xxx..." in str(caught.value)


def test_a_value_in_place_of_a_section_names_its_settings() -> None:
    for value, line in (
        ({"size": 1, "inner": 3}, "f: inner: 3: not a section; give its settings: stage, name"),
        ({"size": 1, "by_name": 3}, "f: by_name: 3: not a section; give keys with values"),
        ({"size": 1, "by_name": {"a": 3}}, "f: by_name.a: 3: not a section; give its settings: "),
    ):
        with pytest.raises(UserError) as caught:
            validate(Outer, value, "f")
        assert str(caught.value).startswith(line)


def test_a_value_in_place_of_a_list_names_brackets() -> None:
    with pytest.raises(UserError) as caught:
        validate(TrainSettings, {"sample_prompts": "Once"}, "f")
    expected = "f: sample_prompts: 'Once': not a list; write it in brackets, as in [a, b]"
    assert expected in str(caught.value).splitlines()
