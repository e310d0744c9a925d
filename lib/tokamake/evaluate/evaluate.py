"""Stage `evaluate`: loss of an exported model on held-out documents, by corpus and overall."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.data.corpus.splits import Rule
from tokamake.errors import UserError

if TYPE_CHECKING:
    from tokamake.config.architecture import Architecture
    from tokamake.data.tokenizers import Tokenizer
    from tokamake.evaluate.held_out import HeldOut

_MAX_NATS = 700.0
"""Maximum loss per token: exp() of a little more overflows 64-bit floats."""
_COLUMNS = ("documents", "tokens", "bytes", "loss", "perplexity", "bits_per_byte")


def evaluate(
    *,
    checkpoint: Path,
    weights: Path,
    data_root: Path,
    tokenizer: Path,
    split: str = "98,1,1",
    split_rule: Rule = "megatron_core",
    held_out: Sequence[str] = (),
    sequence_length: int,
    max_tokens: int = 1_000_000,
    batch_size: int = 8,
    output: Path,
) -> None:
    """Score a model on the test documents of all merged datasets.

    The documents of a corpus are concatenated and cut into windows that share one token, so the
    model predicts each token of the corpus except the first exactly once. The output has, for each
    corpus and overall: documents; predicted tokens; bytes of their UTF-8 text without
    end-of-document tokens; loss in nats per token; perplexity (exponential of the loss); bits per
    byte (total loss in bits divided by bytes). Overall values weigh all tokens equally.

    Without a test split, the model is scored on the validation split, or on the first other one in
    `held_out`; the output names it. Without any of these, the output has no scores.

    Args:
        checkpoint: folder of a Hugging Face or native checkpoint.
        weights: weighting file with the merged datasets and their corpora.
        data_root: folder to which its prefixes are relative.
        tokenizer: tokenizer of the datasets.
        split: shares of the documents of each dataset for training, validation and test.
        split_rule: how to round shares to documents; the value of `index`.
        held_out: NAME=FILE, a weighting file of the datasets of a split, for example test=FILE.
        sequence_length: input tokens of the model.
        max_tokens: maximum tokens per corpus.
        batch_size: windows per forward pass.
        output: JSON file to write.

    Raises:
        UserError: a value is out of range, no corpus has a document of the split, or files do not
            match.
    """
    from tokamake.data.mixture.split_prefixes import SplitPrefixes, parse_held_out
    from tokamake.data.tokenizers import open_tokenizer
    from tokamake.evaluate.held_out import read_held_out
    from tokamake.files import write_json

    for name, value, minimum in (
        ("sequence_length", sequence_length, 1),
        ("max_tokens", max_tokens, 2),
        ("batch_size", batch_size, 1),
    ):
        if value < minimum:
            raise UserError(f"{name}: {value}: too small; give {minimum} or more")
    opened = open_tokenizer(tokenizer)
    splits = SplitPrefixes(
        weights,
        data_root=data_root,
        split=split,
        split_rule=split_rule,
        held_out=parse_held_out(held_out),
    )
    if (evaluated := splits.evaluated) is None:
        empty = _measures("overall", documents=0, tokens=0, bytes=0, nats=0.0)
        write_json(output, {"overall": empty, "corpora": {}})
        print(f"split {split!r}: nothing is held out; the model is not scored")
        return
    corpora = read_held_out(
        splits, evaluated, data_root=data_root, max_tokens=max_tokens, tokenizer=opened
    )
    scores = _score(
        corpora,
        checkpoint,
        tokenizer=opened,
        sequence_length=sequence_length,
        batch_size=batch_size,
    )
    if evaluated != "test":
        scores["split"] = evaluated
        print(f"no test split; scores of the split {evaluated}:")
    write_json(output, scores)
    print(_table(scores))


def _score(
    corpora: "dict[str, HeldOut]",
    checkpoint: Path,
    *,
    tokenizer: "Tokenizer",
    sequence_length: int,
    batch_size: int,
) -> dict[str, Any]:
    from tokamake.checkpoint import model_tensors
    from tokamake.checkpoint.hf import hf_folder
    from tokamake.checkpoint.native.folder import is_native
    from tokamake.checkpoint.native.training_state import read_weights
    from tokamake.evaluate.held_out import text_bytes
    from tokamake.evaluate.perplexity import total_loss
    from tokamake.runtime.process_group import choose_device
    from tokamake.runtime.ranks import Ranks

    if is_native(checkpoint):
        architecture, weights, _ = read_weights(checkpoint)
    else:
        architecture, weights = hf_folder.read(checkpoint)
    _check_fit(checkpoint, architecture, corpora=corpora, sequence_length=sequence_length)
    device = choose_device(Ranks(rank=0, world_size=1, local_rank=0, local_size=1))
    model = model_tensors.to_model(architecture, weights).float().to(device).eval()
    counts: dict[str, dict[str, Any]] = {
        corpus: {
            "documents": len(held_out.lengths),
            "tokens": max(len(held_out.tokens) - 1, 0),
            "bytes": text_bytes(held_out, tokenizer),
            "nats": total_loss(
                model,
                held_out.tokens,
                sequence_length=sequence_length,
                batch_size=batch_size,
                device=device,
            ),
        }
        for corpus, held_out in corpora.items()
    }
    keys = ("documents", "tokens", "bytes", "nats")
    overall: dict[str, Any] = {key: sum(count[key] for count in counts.values()) for key in keys}
    return {
        "overall": _measures("overall", **overall),
        "corpora": {corpus: _measures(corpus, **count) for corpus, count in counts.items()},
    }


def _check_fit(
    checkpoint: Path,
    architecture: "Architecture",
    *,
    corpora: "dict[str, HeldOut]",
    sequence_length: int,
) -> None:
    if sequence_length > architecture.max_position_embeddings:
        raise UserError(
            f"sequence_length: {sequence_length}: the model of {checkpoint} sees only "
            f"{architecture.max_position_embeddings} tokens; lower it"
        )
    for corpus, held_out in corpora.items():
        smallest = int(held_out.tokens.min(initial=0))
        largest = int(held_out.tokens.max(initial=-1))
        if smallest < 0 or largest >= (architecture.vocab_size or 0):
            token = smallest if smallest < 0 else largest
            raise UserError(
                f'corpus "{corpus}": holds token {token}, but the vocabulary of {checkpoint} has '
                f"{architecture.vocab_size} entries; give the model trained with this tokenizer"
            )


def _measures(name: str, *, documents: int, tokens: int, bytes: int, nats: float) -> dict[str, Any]:
    if not nats < _MAX_NATS * max(tokens, 1):
        raise UserError(
            f"{name}: loss {nats / tokens}: no finite perplexity; the weights are broken"
        )
    return {
        "documents": documents,
        "tokens": tokens,
        "bytes": bytes,
        "loss": nats / tokens if tokens else None,
        "perplexity": math.exp(nats / tokens) if tokens else None,
        "bits_per_byte": nats / math.log(2) / bytes if tokens and bytes else None,
    }


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
