"""`tokamake new`: project folders, in which tokamake and Snakemake work."""

import json
import os
import random
import re
import shlex
from pathlib import Path

import pytest
import yaml

from tests.support import snakemake_server
from tests.support.paths import ROOT
from tests.support.workflows import jobs
from tokamake.config.root import Config
from tokamake.config_files import validate
from tokamake.data.corpus.corpora import read_corpora
from tokamake.errors import UserError
from tokamake.project.corpora import find_corpora
from tokamake.project.new import new
from tokamake.project.sizes import size_of
from tokamake.run.command_line import find_profile, snakefile_option

WORDS = ["a", "model", "reads", "text", "and", "writes", "by", "day", "night", "river", "mountain"]


def write_documents(path: Path, number: int = 60, *, key: str = "body") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    chance = random.Random(path.name)
    texts = [" ".join(chance.choices(WORDS, k=100)) for _ in range(number)]
    lines = [json.dumps({"id": n, key: text}) + "\n" for n, text in enumerate(texts)]
    path.write_text("".join(lines))
    return path


def rows(project: Path) -> dict[str, tuple[list[str], str]]:
    """Corpus → files and text key, from the table of a project."""
    table = read_corpora(project / "config/corpora.tsv")
    return {row.corpus: (shlex.split(row.files), row.text_key) for row in table}


def config(project: Path) -> Config:
    path = project / "config/config.yaml"
    return validate(Config, yaml.safe_load(path.read_text()), str(path))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SNAKEMAKE_PROFILE", raising=False)
    return tmp_path


def test_prompts_are_words_of_the_text_if_it_has_any(home: Path) -> None:
    starts = ["... -- ***", "§ 1.2.3 [4]", "Der Zug fährt ab", "Über den Bergen", "私は 学生です"]
    lines = [json.dumps({"text": f"{start} {'x ' * 200}"}) + "\n" for start in starts]
    (home / "words.jsonl").write_text("".join(lines))
    new(Path("words"), "words.jsonl")
    prompts = ("Der Zug fährt", "Über den Bergen", "私は 学生です x")
    assert config(home / "words").generate.prompts == prompts
    (home / "signs.jsonl").write_text("".join(lines[:2]))
    new(Path("signs"), "signs.jsonl")
    assert config(home / "signs").generate.prompts == ("... -- ***", "§ 1.2.3 [4]")


def test_a_project_has_config_table_profile_and_readme(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_documents(home / "data/web/a.jsonl")
    write_documents(home / "data/web/b.jsonl")
    write_documents(home / "data/books.jsonl", key="content")
    new(Path("my-model"), "data/web", "data/books.jsonl", profile="aurora")
    project = home / "my-model"
    assert rows(project) == {
        "web": (["../data/web"], "body"),
        "books": (["../data/books.jsonl"], "content"),
    }
    made = config(project)
    assert (made.run, made.data_set, made.generate.prompts[0].split()[0] in WORDS) == (
        "my-model",
        "default",
        True,
    )
    assert (project / str(made.model.architecture)).is_file()
    table = (project / "config/corpora.tsv").read_text()
    assert "# web: 2 files, " in table
    assert "jsonl; keys: id, body" in table
    profile = yaml.safe_load((project / "profiles/aurora/profile.yaml").read_text())
    assert profile == yaml.safe_load((ROOT / "profiles/aurora/profile.yaml").read_text())
    readme = (project / "README.md").read_text()
    assert "tokamake run config/config.yaml --profile aurora -n" in readme
    assert "snakemake --profile profiles/aurora" in readme
    # The ranks of the profile divide the batch.
    ranks = int(profile["set-resources"]["train"]["tasks"])
    assert made.train.global_batch_size % (ranks * made.train.micro_batch_size) == 0
    command = "cd my-model && tokamake run config/config.yaml --profile aurora;"
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"next: {command}")
    os.chdir(project)
    assert (snakefile_option(), find_profile("aurora")) == ([], Path("profiles/aurora"))


def test_files_of_a_folder_are_a_corpus_and_keys_divide_them(home: Path) -> None:
    for name in ("a", "b"):
        write_documents(home / f"data/{name}.jsonl")
    write_documents(home / "data/c d.txt.jsonl", key="content")
    new(Path("one"), "data/a.jsonl", "data/b.jsonl")
    new(Path("two"), *map(str, sorted((home / "data").glob("*.jsonl"))))
    new(Path("three"), "data/[ab].jsonl")
    for path in (home / "data/c d.txt.jsonl", home / "data/b.jsonl"):
        path.unlink()
    write_documents(home / "data/b.jsonl")
    new(Path("four"), "data/a.jsonl", "data/b.jsonl")
    pair = ["../data/a.jsonl", "../data/b.jsonl"]
    assert rows(home / "one") == {"data": (pair, "body")}
    assert rows(home / "two") == {
        "data": (pair, "body"),
        "c-d": (["../data/c d.txt.jsonl"], "content"),
    }
    assert rows(home / "three") == {"data": (["../data/[ab].jsonl"], "body")}
    assert rows(home / "four") == {"data": (["../data/*.jsonl"], "body")}


def test_a_file_counts_once(home: Path) -> None:
    path = str(write_documents(home / "data/a.jsonl"))
    assert [each.patterns for each in find_corpora([path, path])] == [[path]]
    for names in (["data", "data/a.jsonl"], [path, "data/*.jsonl"]):
        with pytest.raises(UserError, match=r"a\.jsonl: the corpus (data|a) has this file, too"):
            find_corpora(names)


def test_a_bad_document_is_a_warning(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_documents(home / "a.jsonl")
    path.write_bytes(path.read_bytes() + b'{"body": "\xff"}\n')
    new(Path("one"), "a.jsonl")
    warning = capsys.readouterr().err
    assert re.match(r"warning: a\.jsonl:\d+: not valid UTF-8", warning)
    assert "tokenize.on_bad_document: quarantine" in warning
    assert rows(home / "one") == {"a": (["../a.jsonl"], "body")}


def test_files_elsewhere_have_absolute_paths(home: Path) -> None:
    far = write_documents(home / "far/a.jsonl")
    new(home / "near/deep/project", str(far), text_key="body")
    assert rows(home / "near/deep/project") == {"a": ([str(far)], "body")}


def test_a_profile_of_ones_own_is_named_by_its_path(home: Path) -> None:
    write_documents(home / "a.jsonl")
    own = home / "site's"
    own.mkdir()
    (own / "profile.yaml").write_text("cores: 1\n")
    new(Path("project"), "a.jsonl", profile="site's")
    assert not (home / "project/profiles").exists()
    quoted = shlex.quote(str(own))
    assert f"run config/config.yaml --profile {quoted} -n" in Path("project/README.md").read_text()


@pytest.mark.parametrize("name", ["2024", "null", "1e5", "no"])
def test_a_name_that_yaml_would_read_as_a_number_stays_a_text(home: Path, name: str) -> None:
    write_documents(home / "a.jsonl")
    new(Path(name), "a.jsonl")
    assert config(home / name).run == name


def test_sizes_follow_from_the_text(home: Path) -> None:
    few = find_corpora([str(write_documents(home / "few.jsonl", 9))])
    some = find_corpora([str(write_documents(home / "some.jsonl", 900))])
    assert size_of(few, num_ranks=2, is_local=True).split == "100,0,0"
    small = size_of(some, num_ranks=2, is_local=True)
    assert (small.split, small.model.file) == ("90,5,5", "tiny-llama")
    assert 300 <= small.vocab_size <= 256 + 100  # no more than the few words can give
    with (home / "some.jsonl").open("ab") as file:
        file.truncate(8_000_000_000)  # sparse: only its size is read
    large = size_of(some, num_ranks=24, is_local=False)
    assert (large.model.file, large.vocab_size) == ("gpt2-345m", 50_257)
    assert large.global_batch_size % 24 == 0
    tokens = large.train_steps * large.global_batch_size * large.sequence_length
    assert tokens == pytest.approx(min(4 * 2e9, 20 * 354.8e6), rel=0.01)
    assert size_of(some, num_ranks=2, is_local=True).model.file == "tiny-llama"


MISTAKES = {
    ("full", "a.jsonl"): "full: a folder that is not empty; name a new folder",
    ("a.jsonl", "a.jsonl"): "a.jsonl: a file is there; name a new folder",
    ("{x}", "a.jsonl"): "{x}: has a brace, which Snakemake reads as a wildcard; name another",
    ("a\tb", "a.jsonl"): "a\\tb': has a character that does not print; name another folder",
    ("p",): "FILES is missing; name your raw files, their folder or a pattern",
    ("p", "none.jsonl"): "none.jsonl: no such file or folder; fix the path",
    ("p", "*.none"): "*.none: matches no files; fix the path or pattern",
    ("p", ""): "'': not a name that a table can hold",
    ("p", "numbers.jsonl"): "numbers.jsonl: no key holds text, among id; name it with --text-key",
    ("p", "empty.jsonl"): "empty.jsonl: holds no document; name other files",
    ("p", "gone.jsonl"): "gone.jsonl: a link to a missing file; fix or remove it",
    ("p", "{a}.jsonl"): "{a}.jsonl: braces in a path are wildcards of Snakemake",
    ("p", "hf://datasets/a/b"): "hf://datasets/a/b: an address; make the project with files on",
    ("p", "index.bin"): "index.bin: an indexed dataset, not raw text",
    ("full/p", "full"): "lies in full, so that its files would count as raw text",
}


@pytest.mark.parametrize("arguments", MISTAKES)
def test_mistakes_are_one_line_and_make_nothing(home: Path, arguments: tuple[str, ...]) -> None:
    write_documents(home / "a.jsonl")
    write_documents(home / "full/a.jsonl")
    write_documents(home / "{a}.jsonl")
    (home / "numbers.jsonl").write_text('{"id": 1}\n')
    for name in ("empty.jsonl", "index.bin", "index.idx"):
        (home / name).touch()
    (home / "gone.jsonl").symlink_to("nothing")
    before = sorted(home.rglob("*"))
    with pytest.raises(UserError) as error:
        new(Path(arguments[0]), *arguments[1:])
    assert MISTAKES[arguments] in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(home.rglob("*")) == before


def test_a_wrong_text_key_names_the_keys(home: Path) -> None:
    write_documents(home / "a.jsonl")
    with pytest.raises(UserError, match="no text under the key bdoy, among id, body; name the key"):
        new(Path("p"), "a.jsonl", text_key="bdoy")


@pytest.mark.slow
def test_a_project_trains_in_plain_snakemake(home: Path) -> None:
    """Names with spaces and quotes reach no shell unquoted."""
    write_documents(home / "it's $HOME/a b.jsonl", 120)
    project = home / 'my "model"'
    new(project, "it's $HOME/a b.jsonl")
    options = ["--profile", "profiles/local", "--set-resources", "train:tasks=1"]
    planned = jobs(snakemake_server.start([*options, "-n"], project))
    assert planned["train"] == planned["export_hf"] == planned["report"] == 1
    values = "train={train_steps: 4, sequence_length: 32, evaluation_interval: 4}"
    done = snakemake_server.start([*options, "--config", values, "--", "train"], project)
    assert done.returncode == 0, done.stderr
    result = json.loads((project / "results/my-model/train.json").read_text())
    assert result["step"] == 4
    assert sorted(path.name for path in home.iterdir()) == ["it's $HOME", 'my "model"']
