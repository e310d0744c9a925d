"""Stage `evaluate`: loss of a model on held-out documents, by corpus and overall."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from tokamake.data.corpus.splits import SplitRule
from tokamake.errors import UserError
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout, peers
from tokamake.retrieval.chunk_retriever import (
    EVALUATED_CHUNKS,
    NO_NEIGHBORS,
    NeighborOptions,
    retrieve,
)

if TYPE_CHECKING:
    from tokamake.config.architecture import Architecture
    from tokamake.data.tokenizers import Tokenizer
    from tokamake.evaluate.perplexity import HeldOut
    from tokamake.inference.model import InferenceModel

_COLUMNS = ("documents", "tokens", "bytes", "loss", "perplexity", "bits_per_byte")


def evaluate(
    *,
    checkpoint: Path,
    data: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    text_key: tuple[str, ...] = (),
    weights: Path | None = None,
    data_root: Path | None = None,
    split: str = "98,1,1",
    split_rule: SplitRule = "megatron_core",
    held_out: Sequence[str] = (),
    tokenizer: Path | None = None,
    sequence_length: int | None = None,
    max_tokens: int | None = None,
    batch_size: int = 8,
    layout: InferenceLayout = WHOLE_MODEL,
    neighbors: NeighborOptions = NO_NEIGHBORS,
    output: Path | None = None,
) -> None:
    """Measure perplexity on raw files or test documents; with `--task`, the score on a task.

    `tokamake evaluate --task NAME` scores a model on a benchmark (wikitext, lambada, text,
    lm_eval), or a finetuned model on files with labels (rte, sst2, labeled_text, …). It has other
    options: `tokamake evaluate --task NAME --help` lists them.

    The test documents are of all merged datasets in a weighting file.

    The documents of a corpus, or of a raw file, are concatenated and cut into windows that share
    one token, so the model predicts each token except the first exactly once. The output has, for
    each corpus and overall: documents; predicted tokens; bytes of their UTF-8 text without
    end-of-document tokens; loss in nats per token; perplexity (exponential of the loss); bits per
    byte (total loss in bits divided by bytes). Overall values weigh all tokens equally.

    Without a test split of the datasets, the model is scored on the validation split, or on the
    first other split in `held_out`; the output names it. Without a held-out split, the output has
    no scores.

    A model that is too large for one device is shared by several ranks: `torchrun --nproc-per-node
    4 -m tokamake evaluate --tensor-parallel-size 4 …`, or through mpiexec or srun. Scores do not
    depend on the number of ranks.

    Args:
        checkpoint: folder of a checkpoint of any format, or of a run, whose newest one counts.
        data: raw files, folders or patterns of any format that `tokenize` reads.
        text_key: key or column of the raw files that holds the text (default "text").
        weights: weighting file with the merged datasets and their corpora, in place of raw files.
        data_root: folder to which its prefixes, and the datasets of neighbors, are relative.
        split: shares of the documents of each dataset for training, validation and test.
        split_rule: how to round shares to documents; the value of `index`.
        held_out: NAME=FILE, a weighting file of the datasets of a split, for example test=FILE.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        sequence_length: input tokens of the model; by default as in its training, else as many
            as the model sees, at most 4096.
        max_tokens: maximum tokens of each corpus or raw file; by default all.
        batch_size: windows per forward pass.
        layout: how ranks share the model.
        neighbors: where a model of family retro finds neighbors of each chunk: in documents of the
            training split, so not in held-out documents.
        output: JSON file to write.
    """
    from tokamake.checkpoint.detect import open_any
    from tokamake.checkpoint.load_model import sequence_length_of, tokenizer_of
    from tokamake.data.mixture.split_prefixes import SplitPrefixes, parse_held_out
    from tokamake.data.mixture.weighting_file import divide_root, find_root
    from tokamake.evaluate.perplexity import read_held_out, read_raw
    from tokamake.inference.model import InferenceModel

    check_values(
        sequence_length=(sequence_length, 1), max_tokens=(max_tokens, 2), batch_size=(batch_size, 1)
    )
    if bool(data) == (weights is not None):
        raise UserError("give either raw files with --data, or --weights with --data-root")
    limit, evaluated = sys.maxsize if max_tokens is None else max_tokens, None
    root = data_root or Path()
    with peers() as ranks:
        with ranks.together():
            opened = open_any(checkpoint)
            layout.check(opened.architecture, world_size=ranks.ranks.world_size)
            neighbors.check(opened.architecture)
            text_tokenizer = tokenizer_of(opened, tokenizer)
            if weights is None:
                corpora = read_raw(
                    data, text_key=text_key, max_tokens=limit, tokenizer=text_tokenizer
                )
            else:
                _, root = divide_root(find_root(weights, data_root))
                given = parse_held_out(held_out)
                splits = SplitPrefixes(
                    weights, data_root=root, split=split, split_rule=split_rule, held_out=given
                )
                evaluated = splits.evaluated
                corpora = {}
                if evaluated is not None:
                    corpora = read_held_out(
                        splits,
                        evaluated,
                        data_root=root,
                        max_tokens=limit,
                        tokenizer=text_tokenizer,
                    )
            length = sequence_length_of(opened, sequence_length)
            _check_fit(checkpoint, opened.architecture, corpora=corpora)
        model = InferenceModel(opened, layout, peers=ranks) if corpora else None
        if model:
            with ranks.together():
                retrieve(
                    model,
                    neighbors,
                    data_root=root,
                    tokenizer=text_tokenizer,
                    peers=ranks,
                    batch_size=EVALUATED_CHUNKS,
                )
        scores = _score(
            corpora, model, tokenizer=text_tokenizer, sequence_length=length, batch_size=batch_size
        )
        with ranks.together():
            if ranks.is_first:
                _report(scores, output, length=length, split=evaluated, stated=split)


def _report(
    scores: dict[str, Any], output: Path | None, *, length: int, split: str | None, stated: str
) -> None:
    """Write the scores and print them as a table.

    `split`: the documents' split; None: raw files, or nothing is held out.
    """
    from tokamake.files import write_json

    if scores["corpora"]:
        scores["sequence_length"] = length
        if split not in (None, "test"):
            scores["split"] = split
    if output:
        write_json(output, scores)
    if not scores["corpora"]:
        print(f"split {stated!r}: nothing is held out; the model is not scored")
        return
    if "split" in scores:
        print(f"no test split; scores of the split {split}:")
    print(f"sequence length {length:,}")
    print(_table(scores))


def check_values(**values: tuple[int | None, int]) -> None:
    for name, (value, minimum) in values.items():
        if value is not None and value < minimum:
            raise UserError(f"{name}: {value}: too small; give {minimum} or more")


def _score(
    corpora: "dict[str, HeldOut]",
    model: "InferenceModel | None",
    *,
    tokenizer: "Tokenizer",
    sequence_length: int,
    batch_size: int,
) -> dict[str, Any]:
    from tokamake.evaluate.perplexity import measures, text_bytes, total_loss

    counts: dict[str, dict[str, Any]] = {
        corpus: {
            "documents": len(held_out.lengths),
            "tokens": max(len(held_out.tokens) - 1, 0),
            "bytes": text_bytes(held_out, tokenizer),
            "nats": total_loss(
                model, held_out.tokens, sequence_length=sequence_length, batch_size=batch_size
            ),
        }
        for corpus, held_out in corpora.items()
        if model
    }
    keys = ("documents", "tokens", "bytes", "nats")
    overall: dict[str, Any] = {key: sum(count[key] for count in counts.values()) for key in keys}
    return {
        "overall": measures("overall", **overall),
        "corpora": {corpus: measures(corpus, **count) for corpus, count in counts.items()},
    }


def _check_fit(
    checkpoint: Path, architecture: "Architecture", *, corpora: "dict[str, HeldOut]"
) -> None:
    for corpus, held_out in corpora.items():
        smallest = int(held_out.tokens.min(initial=0))
        largest = int(held_out.tokens.max(initial=-1))
        if smallest < 0 or largest >= (architecture.vocab_size or 0):
            token = smallest if smallest < 0 else largest
            raise UserError(
                f'corpus "{corpus}": holds token {token}, but the vocabulary of {checkpoint} has '
                f"{architecture.vocab_size} entries; give the model trained with this tokenizer"
            )


def _table(scores: dict[str, Any]) -> str:
    rows = {**scores["corpora"], "overall": scores["overall"]}
    width = max(map(len, [*rows, "corpus"]))
    header = f"{'corpus':<{width}}" + "".join(f"{column:>15}" for column in _COLUMNS)
    lines = [
        f"{name:<{width}}" + "".join(f"{_cell(row[column]):>15}" for column in _COLUMNS)
        for name, row in rows.items()
    ]
    return "\n".join([header, *lines])


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4f}"
