"""Stage `weigh`: write the weighting files: of the training split, and of other splits."""

import logging
import math
import os
import re
from pathlib import Path
from typing import Any

from tokamake.data.corpus.corpora import (
    Corpus,
    ListedDataset,
    check_rows,
    listed_corpus,
    read_corpora,
)
from tokamake.data.corpus.plan_file import read_plan
from tokamake.data.mixture.shares import TOLERANCE, seen_tokens, shares
from tokamake.data.mixture.weighting_file import (
    WeightedPrefix,
    find_prefix,
    location,
    scan,
    write_weighting_file,
)
from tokamake.errors import UserError
from tokamake.files import read_json
from tokamake.remote.addresses import is_remote
from tokamake.runtime.console import counted

_log = logging.getLogger(__name__)


def weigh(
    *,
    corpora: Path | None = None,
    weights: Path | None = None,
    data_root: Path | None = None,
    plan: Path | None = None,
    metadata: Path,
    output: Path,
    split: str | None = None,
    train_tokens: int | None = None,
    temperature: float | None = None,
    max_epochs: float = 4.0,
    leave_out: tuple[str, ...] = (),
    titles: str = "",
) -> None:
    """Write the weighting file: divide each corpus' share among its datasets by their tokens.

    A corpus states a weight (a share relative to other corpora), epochs (how often training sees
    it) or a temperature T (its share is in proportion to tokens ** (1 / T)). Corpora with weights
    or temperatures share the tokens that epochs leave.

    Existing datasets that a weighting file lists keep their weights. With a table of corpora beside
    it, the weights of both are on one scale, and the sum of a corpus' lines is its weight.

    Weights of a table sum to 1. Every weight keeps its full precision. Prefixes are relative to the
    folder of the output, so that you can move datasets and weighting file together.

    If corpora name their splits (column `sets`), each split but train gets its own weighting file:
    weights.txt, weights.valid.txt, weights.test.txt. If all corpora of a split state weights, these
    apply to it too; otherwise it draws from all documents in proportion to their tokens.

    Args:
        corpora: table of corpora with their weights, epochs or temperatures.
        weights: weighting file that lists existing datasets, which the plan links to.
        data_root: folder that its prefixes are relative to; by default the file's folder.
        plan: plan.json of the workflow; needed with `weights`.
        metadata: JSON file that `describe` wrote for all datasets.
        output: weighting file of the training.
        split: shares of documents for training, validation and test, as `index` gets them; epochs
            then count training documents, without it whole corpora.
        train_tokens: tokens that the whole training sees; needed if only some corpora state epochs.
        temperature: temperature of the corpora that state nothing; 1 weighs corpora by size, a
            higher temperature makes the shares more equal.
        leave_out: corpora of the metadata to ignore, because another training uses them; the table
            has no row for them.
        titles: text key of titles, which are read along with texts: their datasets have no weight,
            and their tokens do not count.
        max_epochs: number of epochs above which a corpus gets a warning. Beyond about 4 epochs,
            repeated tokens are worth clearly less than new ones (Muennighoff et al. 2023).
    """
    check_options(train_tokens, temperature)
    if not max_epochs > 0:
        raise UserError(f"--max-epochs: {max_epochs:g}: not above 0; give a number of epochs")
    rows, listed = _read_rows(
        corpora, weights, data_root=data_root, plan=plan, temperature=temperature
    )
    source = corpora or weights or Path()
    datasets = read_json(metadata, "create it with `tokamake describe`")
    datasets = [dataset for dataset in datasets if dataset.get("corpus") not in leave_out]
    if titles:
        is_title = re.compile(rf".*_{re.escape(titles)}(?:_(?:sentence|document))?")
        datasets = [each for each in datasets if not is_title.fullmatch(each["data_prefix"])]
    tokens = _count_tokens(datasets, rows, metadata=metadata, source=source)
    training_rows = [row for row in rows if row.trains]
    if not training_rows:
        raise UserError(f"{source}: no corpus trains; add `train` to the sets column of one")
    seen = seen_tokens(training_rows, tokens, split=split)
    train = shares(training_rows, seen, train_tokens=train_tokens, table=source)
    _warn(
        training_rows, train, seen, train_tokens=train_tokens, max_epochs=max_epochs, table=source
    )
    if corpora is None:  # a list keeps its own weights, whatever their sum
        train = {row.corpus: row.weight or 0 for row in training_rows}
    root, by_name = os.path.relpath(metadata.parent, output.parent), {r.corpus: r for r in rows}
    for name, split_shares in {"train": train, **_held_out_shares(rows, tokens)}.items():
        path = output if name == "train" else split_weights_path(output, name)
        lines = [
            _weigh_dataset(
                dataset,
                by_name[corpus],
                share=split_shares[corpus],
                num_tokens=tokens[corpus],
                split=name,
                line=listed.get(Path(dataset["data_prefix"]).name),
            )
            for dataset in datasets
            if (corpus := dataset["corpus"]) in split_shares
        ]
        _write(path, lines, root=root)


def _read_rows(
    corpora: Path | None,
    weights: Path | None,
    *,
    data_root: Path | None,
    plan: Path | None,
    temperature: float | None,
) -> tuple[list[Corpus], dict[str, ListedDataset]]:
    """Return the corpora of a table and of a weighting file, and the listed datasets.

    Listed datasets are keyed by the name of the merged dataset that links to them.
    """
    if corpora is None and weights is None:
        raise UserError("--corpora: missing; name a table of corpora, or a list with --weights")
    rows = [] if corpora is None else read_corpora(corpora, temperature=temperature)
    if weights is None:
        return rows, {}
    if plan is None:
        raise UserError("--plan: missing; with --weights, name the plan that links to its datasets")
    rows += (listed_rows := read_listed_corpora(weights, data_root))
    check_rows(rows)
    # Two runs may list one dataset in different corpora, with different weights.
    names = {(merge.corpus, merge.dataset): merge.name for merge in read_plan(plan).merged}
    listed = {}
    for row in listed_rows:
        for line in row.listed:
            if (name := names.get((row.corpus, line.prefix))) is None:
                raise UserError(f"{line.where}: {line.prefix}: not in {plan}; plan again")
            listed[name] = line
    return rows, listed


def read_listed_corpora(weights: Path, data_root: Path | None) -> list[Corpus]:
    """Read a weighting file as corpora, in the order of their first lines.

    Lines of weight 0 are left out: no sample is drawn from them.
    """
    if not weights.exists():
        raise UserError(f"weights: {weights}: no such file; fix the path of the list")
    root = weights.parent if data_root is None else data_root
    lines, problems = scan(weights)
    # A problem of the whole file, such as no weight above 0, may come from its lines.
    if errors := [problem for problem in problems if problem.number] or problems:
        raise UserError("\n".join(location(weights, p.number) + p.text for p in errors))
    datasets: dict[str, list[ListedDataset]] = {}
    for number, _, _, entry in lines:
        if entry.weight:
            where = location(weights, number).removesuffix(": ")
            if is_remote(entry.prefix):
                raise UserError(
                    f"{where}: {entry.prefix}: a list takes no addresses; name raw files behind "
                    "addresses in a table of corpora"
                )
            prefix = find_prefix(entry.prefix, root, search=data_root is not None)
            listed = ListedDataset(prefix, entry.weight, entry.part, where)
            datasets.setdefault(entry.corpus, []).append(listed)
    return [listed_corpus(corpus, listed) for corpus, listed in datasets.items()]


def _weigh_dataset(
    dataset: dict[str, Any],
    row: Corpus,
    *,
    share: float,
    num_tokens: int,
    split: str,
    line: ListedDataset | None,
) -> WeightedPrefix:
    """Return a dataset's part of the share of its corpus: by its listed weight, or by tokens."""
    if line:
        # In this order, a share that is the weight of the corpus gives exactly the listed weight.
        weight, part = line.weight * (share / (row.weight or 1)), line.part
    else:
        weight, part = share * dataset["total_num_tokens"] / num_tokens, row.parts.get(split)
    return WeightedPrefix(weight, dataset["data_prefix"], row.corpus, part)


def _write(path: Path, lines: list[WeightedPrefix], *, root: str) -> None:
    """Write a weighting file; `root` is the folder of the metadata, relative to the file's."""
    moved = [line._replace(prefix=os.path.normpath(Path(root, line.prefix))) for line in lines]
    write_weighting_file(path, moved)
    num_corpora = len({line.corpus for line in moved})
    print(f"{path}: {counted(len(moved), 'dataset')} of {num_corpora} corpora")


def split_weights_path(weights: Path, name: str) -> Path:
    """Path of a split's weighting file, beside the training split's: weights.valid.txt."""
    return weights.with_name(f"{weights.stem}.{name}{weights.suffix}")


def _held_out_shares(rows: list[Corpus], tokens: dict[str, int]) -> dict[str, dict[str, float]]:
    """Return, for each split but train that corpora name, the shares of its corpora."""
    shares: dict[str, dict[str, float]] = {}
    names = dict.fromkeys(name for row in rows for name in row.parts if name != "train")
    for name in names:
        members = [row for row in rows if name in row.parts]
        all_weighted = all(row.weight for row in members)
        amounts = {
            row.corpus: (row.weight or 0)
            if all_weighted
            else tokens[row.corpus] * (row.parts[name][1] - row.parts[name][0])
            for row in members
        }
        total = math.fsum(amounts.values())
        shares[name] = {corpus: amount / total for corpus, amount in amounts.items()}
    return shares


def check_options(train_tokens: int | None, temperature: float | None) -> None:
    if train_tokens is not None and train_tokens < 1:
        raise UserError(f"--train-tokens: {train_tokens}: give a number of tokens, 1 or more")
    if temperature is not None and not 0.01 <= temperature < float("inf"):
        raise UserError(f"--temperature: {temperature:g}: give a finite number, 0.01 or more")


def _count_tokens(
    datasets: list[dict[str, Any]], rows: list[Corpus], *, metadata: Path, source: Path
) -> dict[str, int]:
    tokens = dict.fromkeys((row.corpus for row in rows), 0)
    duplicates, filtered = dict.fromkeys(tokens, 0), dict.fromkeys(tokens, 0)
    for dataset in datasets:
        if not {"corpus", "data_prefix", "total_num_tokens"} <= set(dataset):
            raise UserError(f"{metadata}: not written by `tokamake describe`; recreate it")
        counts = [each.get("tokens", 0) for each in dataset.get("lengths", ())]
        if counts and sum(counts) != dataset["total_num_tokens"]:
            raise UserError(
                f"{metadata}: {dataset['data_prefix']}: its counts of tokens contradict each "
                "other; remove the file and rerun the workflow"
            )
        corpus = dataset["corpus"]
        if corpus not in tokens:
            raise UserError(f'{metadata}: corpus "{corpus}" is not in {source}; add a row')
        tokens[corpus] += dataset["total_num_tokens"]
        duplicates[corpus] += dataset.get("duplicate_documents") or 0
        filtered[corpus] += dataset.get("filtered_documents") or 0
    for row in rows:
        if tokens[row.corpus] == 0:
            raise _no_token(row, duplicates[row.corpus], filtered=filtered[row.corpus])
    return tokens


def _no_token(row: Corpus, duplicates: int, *, filtered: int) -> UserError:
    """The error of a corpus without tokens, with the number of documents left out of it."""
    reason = "" if row.is_indexed else f": {row.files} has no text under {row.text_key}"
    remedy = "remove the row, or fix the files"
    if duplicates or filtered:
        reason = f": duplicate documents: {duplicates:,}, dropped by filters: {filtered:,}"
        remedy = "remove the row, or change the filters"
    return UserError(f'{row.where}: corpus "{row.corpus}" has no token{reason}; {remedy}')


def _warn(
    rows: list[Corpus],
    shares: dict[str, float],
    tokens: dict[str, int],
    *,
    train_tokens: int | None,
    max_epochs: float,
    table: Path,
) -> None:
    epoch_tokens = sum(row.epochs * tokens[row.corpus] for row in rows if row.epochs)
    all_state = all(row.epochs for row in rows)
    if all_state and train_tokens and epoch_tokens < train_tokens * (1 - TOLERANCE):
        _log.warning(
            "%s: its epochs make up %s tokens, the training has %s; every corpus is seen %.4g "
            "times as often as stated",
            *(table, f"{round(epoch_tokens):,}", f"{train_tokens:,}", train_tokens / epoch_tokens),
        )
    # If all corpora state epochs, these determine the length of the training.
    length = train_tokens or (epoch_tokens if all_state else 0)
    for corpus, share in shares.items():
        epochs = share * length / tokens[corpus]
        if epochs > max_epochs * (1 + 1e-9):  # tolerate rounding
            _log.warning(
                '%s: corpus "%s" is seen %.4g times, more than --max-epochs %g: it has %s tokens, '
                "%s are drawn from it; lower its share or add data",
                *(table, corpus, epochs, max_epochs),
                *(f"{tokens[corpus]:,}", f"{round(share * length):,}"),
            )
