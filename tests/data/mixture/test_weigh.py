"""`weigh` divides the share of each corpus by tokens; the weights sum to one."""

import json
import logging
import math
import random
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset as MegatronDataset

from tests.support.tokenized import tokenized
from tokamake.data.indexed.describe import describe
from tokamake.data.indexed.merge import merge
from tokamake.data.mixture.weigh import weigh
from tokamake.errors import UserError


@pytest.fixture
def merged(workspace: Path) -> list[Path]:
    """Merged datasets of two corpora, one for each raw file."""
    prefixes = []
    for corpus in ("code", "docs"):
        for number, raw in enumerate(sorted((workspace / "raw" / corpus).iterdir())):
            shard = workspace / f"shards/{corpus}{number}"
            tokenized(workspace, raw, name=shard)
            prefixes.append(workspace / f"merged/{corpus}-{number:04d}_text_document")
            merge([shard], output=prefixes[-1], corpus=corpus)
    return prefixes


def test_metadata_counts_what_megatron_reads_and_weights_follow_it(
    workspace: Path, merged: list[Path]
) -> None:
    describe(list(reversed(merged)), output=workspace / "metadata.json")
    datasets = json.loads((workspace / "metadata.json").read_text())
    assert [dataset["data_prefix"] for dataset in datasets] == [
        f"merged/{prefix.name}" for prefix in merged
    ]
    for dataset, prefix in zip(datasets, merged, strict=True):
        reference = MegatronDataset(str(prefix))
        assert dataset["total_num_tokens"] == reference.sequence_lengths.sum()
        assert dataset["total_num_docs"] == len(reference.document_indices) - 1
        assert json.loads((workspace / f"metadata/{prefix.name}.json").read_text()) == dataset

    weigh(
        corpora=workspace / "corpora.tsv",
        metadata=workspace / "metadata.json",
        output=workspace / "weights.txt",
    )
    lines = [line.split(" ") for line in (workspace / "weights.txt").read_text().splitlines()]
    assert [(prefix, corpus) for _, prefix, corpus in lines] == [
        (dataset["data_prefix"], dataset["corpus"]) for dataset in datasets
    ]
    assert math.isclose(math.fsum(float(weight) for weight, _, _ in lines), 1, rel_tol=1e-15)
    code = [dataset["total_num_tokens"] for dataset in datasets if dataset["corpus"] == "code"]
    assert math.isclose(float(lines[0][0]), Fraction(7, 10) * code[0] / sum(code), rel_tol=1e-15)


def test_corpora_that_do_not_match_the_metadata_are_refused(
    workspace: Path, merged: list[Path]
) -> None:
    describe(merged[:2], output=workspace / "metadata.json")
    whole = (workspace / "metadata.json").read_text()
    tokens = json.loads(whole)[0]["total_num_tokens"]
    (workspace / "metadata.json").write_text(whole.replace(f"{tokens}", f"{tokens + 100}", 1))
    with pytest.raises(UserError, match="its counts of tokens contradict each other; remove the"):
        weigh(
            corpora=workspace / "corpora.tsv",
            metadata=workspace / "metadata.json",
            output=workspace / "weights.txt",
        )
    (workspace / "metadata.json").write_text(whole)
    arguments = {"metadata": workspace / "metadata.json", "output": workspace / "weights.txt"}
    with pytest.raises(UserError, match='corpus "docs" has no token'):
        weigh(corpora=workspace / "corpora.tsv", **arguments)
    entry = {"corpus": "docs", "data_prefix": "d", "total_num_tokens": 0, "duplicate_documents": 2}
    described = [*json.loads(whole), {**entry, "filtered_documents": 3}]
    (workspace / "metadata.json").write_text(json.dumps(described))
    message = r'"docs" has no token: duplicate documents: 2, dropped by filters: 3; remove the row'
    with pytest.raises(UserError, match=message):
        weigh(corpora=workspace / "corpora.tsv", **arguments)
    (workspace / "metadata.json").write_text(whole)
    table = workspace / "corpora.tsv"
    table.write_text("corpus\tfiles\tweight\ndocs\tx\t1\n")
    with pytest.raises(UserError, match='corpus "code" is not in'):
        weigh(corpora=table, **arguments)
    merged[0].with_name(merged[0].name + ".bin").write_bytes(b"")
    with pytest.raises(UserError, match="0 bytes, but its index counts"):
        describe(merged, output=workspace / "metadata.json")


def write_metadata(folder: Path, datasets: list[tuple[str, int]]) -> Path:
    """Write metadata with the keys that `weigh` reads, from (corpus, tokens) of each dataset."""
    described = [
        {"data_prefix": f"merged/{corpus}-{number:04d}", "corpus": corpus, "total_num_tokens": size}
        for number, (corpus, size) in enumerate(datasets)
    ]
    path = folder / "metadata.json"
    path.write_text(json.dumps(described))
    return path


def write_table(folder: Path, rows: dict[str, dict[str, Any]]) -> Path:
    columns = ("weight", "epochs", "temperature")
    lines = ["\t".join(("corpus", "files", *columns))]
    lines += [
        "\t".join((corpus, "x", *(str(stated.get(column, "")) for column in columns)))
        for corpus, stated in rows.items()
    ]
    path = folder / "corpora.tsv"
    path.write_text("\n".join(lines) + "\n")
    return path


def weighed(
    folder: Path, rows: dict[str, dict[str, Any]], datasets: list[tuple[str, int]], **options: Any
) -> list[tuple[float, str, str]]:
    """Run `weigh`; return (weight, prefix, corpus) of each line."""
    weigh(
        corpora=write_table(folder, rows),
        metadata=write_metadata(folder, datasets),
        output=folder / "weights.txt",
        **options,
    )
    lines = [line.split(" ") for line in (folder / "weights.txt").read_text().splitlines()]
    return [(float(weight), prefix, corpus) for weight, prefix, corpus in lines]


def shares_of(lines: list[tuple[float, str, str]]) -> dict[str, float]:
    names = {corpus for _, _, corpus in lines}
    return {name: math.fsum(w for w, _, corpus in lines if corpus == name) for name in names}


def tokens_of(datasets: list[tuple[str, int]]) -> dict[str, int]:
    return {name: sum(size for corpus, size in datasets if corpus == name) for name, _ in datasets}


def draw_datasets(draw: random.Random) -> list[tuple[str, int]]:
    """Draw datasets of two to seven corpora, of 1 to 10 ** 11 tokens."""
    names = [f"c{number}" for number in range(draw.randint(2, 7))]
    more = [draw.choice(names) for _ in range(draw.randint(0, 60))]
    return [(name, round(10 ** draw.uniform(0, 11))) for name in [*names, *more]]


def assert_near(value: float, expected: Fraction | float, tolerance: float = 4e-15) -> None:
    assert abs(Fraction(value) / Fraction(expected) - 1) < tolerance


@pytest.mark.parametrize("seed", range(30))
def test_a_table_of_weights_always_gives_the_same_bytes(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    datasets = draw_datasets(draw)
    tokens = tokens_of(datasets)
    weights = {name: round(draw.random(), 6) + 1e-6 for name in tokens}
    for options in ({}, {"train_tokens": 12345}, {"temperature": 3.0}):
        weighed(tmp_path, {name: {"weight": weights[name]} for name in tokens}, datasets, **options)
        expected = ""
        for number, (name, size) in enumerate(datasets):
            share = weights[name] / sum(weights.values())
            expected += f"{share * size / tokens[name]!r} merged/{name}-{number:04d} {name}\n"
        assert (tmp_path / "weights.txt").read_text() == expected


@pytest.mark.parametrize("seed", range(30))
def test_temperature_flattens_shares(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    datasets, temperature = draw_datasets(draw), draw.choice([1, 0.3, 1.5, 10 / 3, 5, 100])
    tokens = tokens_of(datasets)
    if seed % 2:
        lines = weighed(tmp_path, {name: {"temperature": temperature} for name in tokens}, datasets)
    else:
        lines = weighed(tmp_path, {name: {} for name in tokens}, datasets, temperature=temperature)
    # The formula of mT5: a power of the share of all tokens, normalized.
    whole = sum(tokens.values())
    powers = {name: (size / whole) ** (1 / temperature) for name, size in tokens.items()}
    for name, share in shares_of(lines).items():
        assert_near(share, powers[name] / math.fsum(powers.values()), 1e-13)
    for (weight, _, name), (_, size) in zip(lines, datasets, strict=True):
        assert_near(weight / shares_of(lines)[name], Fraction(size, tokens[name]))
    assert math.isclose(math.fsum(weight for weight, _, _ in lines), 1, rel_tol=4e-15)
    if temperature == 1:
        for (weight, _, _), (_, size) in zip(lines, datasets, strict=True):
            assert_near(weight, Fraction(size, whole))


def test_each_corpus_may_have_its_own_temperature(tmp_path: Path) -> None:
    rows = {"a": {"temperature": 1}, "b": {"temperature": 2}, "c": {"temperature": 0.5}}
    lines = weighed(tmp_path, rows, [("a", 60), ("b", 900), ("c", 3), ("a", 1)])
    assert [w for w, _, _ in lines] == pytest.approx([0.6, 0.3, 0.09, 0.01], rel=4e-15, abs=0)


@pytest.mark.parametrize("seed", range(30))
def test_epochs_draw_tokens_in_proportion(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    datasets = draw_datasets(draw)
    tokens = tokens_of(datasets)
    epochs = {name: round(draw.uniform(0.01, 4), 3) for name in tokens}
    needed = sum(Fraction(epochs[name]) * size for name, size in tokens.items())
    lines = weighed(tmp_path, {name: {"epochs": epochs[name]} for name in tokens}, datasets)
    for name, share in shares_of(lines).items():
        assert_near(share, Fraction(epochs[name]) * tokens[name] / needed)
    weighed(
        *(tmp_path, {name: {"epochs": epochs[name]} for name in tokens}, datasets),
        train_tokens=max(round(needed), 1),
    )
    if needed > 1000:
        assert [(float(w), p, c) for w, p, c in lines] == weighed(
            *(tmp_path, {name: {"epochs": epochs[name]} for name in tokens}, datasets),
            train_tokens=math.floor(needed / Fraction(1009, 1000)),
        )


@pytest.mark.parametrize("seed", range(40))
def test_weights_and_temperatures_share_the_tokens_that_epochs_leave(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    datasets = draw_datasets(draw)
    tokens = tokens_of(datasets)
    names = list(tokens)
    with_epochs = names[: draw.randint(1, len(names) - 1)]
    epochs = {name: round(draw.uniform(0.01, 4), 3) for name in with_epochs}
    rows: dict[str, dict[str, Any]] = {name: {"epochs": epochs[name]} for name in with_epochs}
    if seed % 2:
        parts = {name: Fraction(draw.randint(1, 9)) for name in names[len(rows) :]}
        rows |= {name: {"weight": float(part)} for name, part in parts.items()}
    else:
        parts = {name: Fraction(tokens[name]) for name in names[len(rows) :]}
        rows |= {name: {"temperature": 1} for name in parts}
    needed = sum(Fraction(epochs[name]) * tokens[name] for name in with_epochs)
    train_tokens = math.ceil(needed * Fraction(draw.uniform(1.01, 5))) + 1
    lines = weighed(tmp_path, rows, datasets, train_tokens=train_tokens, max_epochs=1e300)
    for name, share in shares_of(lines).items():
        if name in epochs:
            assert_near(share * train_tokens / tokens[name], epochs[name])
        else:
            rest = (1 - needed / train_tokens) * parts[name] / sum(parts.values())
            assert_near(share, rest)
    assert math.isclose(math.fsum(weight for weight, _, _ in lines), 1, rel_tol=4e-15)


DATASETS = [("a", 600), ("b", 300), ("b", 100), ("c", 1000)]
EPOCHS = {"a": {"epochs": 2}, "b": {"epochs": 0.5}, "c": {"epochs": 1}}


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (EPOCHS | {"a": {}}, {}, r"corpora\.tsv:2: no weight, epochs or temperature; give one"),
        (
            {"a": {"weight": 1}, "b": {}, "c": {"weight": 1}},
            {"temperature": 5.0},
            r"corpora\.tsv:3: temperature 5, but line 2 has a weight",
        ),
        (
            EPOCHS | {"c": {"weight": 1}},
            {},
            r"corpora\.tsv: some corpora state epochs and some do not.* give --train-tokens",
        ),
        (EPOCHS, {"train_tokens": 2375}, "its epochs need 2,400 tokens, the training has 2,375"),
        (EPOCHS, {"train_tokens": 0}, "--train-tokens: 0: give a number of tokens, 1 or more"),
        (EPOCHS, {"temperature": 0.0}, "--temperature: 0: give a finite number, 0.01 or more"),
        (EPOCHS, {"temperature": math.inf}, "--temperature: inf: give a finite number"),
        (EPOCHS, {"max_epochs": 0.0}, "--max-epochs: 0: not above 0; give a number"),
        (EPOCHS, {"max_epochs": math.nan}, "--max-epochs: nan: not above 0"),
    ],
)
def test_impossible_shares_are_refused(
    tmp_path: Path, rows: dict[str, dict[str, Any]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        weighed(tmp_path, rows, DATASETS, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "weights.txt").exists()


def test_many_epochs_get_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def messages(rows: dict[str, dict[str, Any]], **options: Any) -> list[str]:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            weighed(tmp_path, rows, DATASETS, **options)
        return [record.getMessage() for record in caplog.records]

    weights = {name: {"weight": 1} for name in "abc"}
    assert messages(weights) == []
    assert messages(weights, train_tokens=4800) == []
    assert messages(weights, train_tokens=4830) == [
        f'{tmp_path}/corpora.tsv: corpus "b" is seen 4.025 times, more than --max-epochs 4: '
        "it has 400 tokens, 1,610 are drawn from it; lower its share or add data"
    ]
    assert len(messages(weights, train_tokens=4800, max_epochs=2)) == 2
    # If all corpora state epochs, these determine the length of the training.
    assert messages(EPOCHS) == []
    assert len(messages(EPOCHS | {"b": {"epochs": 5}})) == 1
    assert messages(EPOCHS, train_tokens=2400) == []
    assert messages(EPOCHS, train_tokens=4800) == [
        f"{tmp_path}/corpora.tsv: its epochs make up 2,400 tokens, the training has 4,800; "
        "every corpus is seen 2 times as often as stated"
    ]


def test_titles_have_no_weight_and_no_tokens(workspace: Path, merged: list[Path]) -> None:
    metadata = workspace / "metadata.json"
    describe(merged, output=metadata)
    datasets = json.loads(metadata.read_text())

    def weights(name: str, **options: str) -> str:
        output = workspace / name
        weigh(corpora=workspace / "corpora.tsv", metadata=metadata, output=output, **options)
        return output.read_text()

    expected = weights("alone.txt")
    titles = [{**datasets[0], "data_prefix": "merged/code-0000_title_sentence"}]
    metadata.write_text(json.dumps([*datasets, *titles]))
    assert weights("titled.txt", titles="title") == expected
    assert weights("all.txt").count("\n") == expected.count("\n") + 1
