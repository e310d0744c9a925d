"""Tool `trace-sample`: what a training step saw, back to the raw lines that it was made from."""

from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake.errors import UserError
from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from tokamake.data.samples.fim.samples import FimSamples, Traced
    from tokamake.data.samples.loader import DocumentSpan, Samples


def trace_sample(run: Path, step: int, row: int, /, *, token: int | None = None) -> None:
    """Find the raw lines that a row of a training step was made from.

    Tokens are those that the model sees, in their order, also where train.fim rearranges documents.

    Args:
        run: settings of the training run, run.yaml in its folder.
        step: training step, from 1, as logs count them.
        row: row of the step's global batch, from 0.
        token: a token of that row, from 0, instead of all; the one after the last input is its
            label.

    Raises:
        UserError: there is no such step, row or token, or the index is missing, or the tokenizer
            where documents are rearranged.
    """
    from tokamake.config.resolved_run import read_run
    from tokamake.data.samples.fim.samples import training_samples

    settings = read_run(run)
    train = settings.train
    sizes = train.batch_sizes
    before = sizes.samples(max(step - 1, 0))
    for name, value, first, last in (
        ("step", step, 1, train.train_steps),
        ("row", row, 0, sizes.at(before) - 1),
        ("token", token or 0, 0, train.sequence_length),
    ):
        if not first <= value <= last:
            raise UserError(f"{run}: {name} {value}: there is none; give {first} to {last}")
    samples = training_samples(settings)
    sample = before + row
    print(f"step {step}, row {row}: sample {sample}, of corpus {samples.source(sample)}")
    traced, pieces = _traced(samples, sample), samples.pieces(sample)
    where = cache(lambda piece: _where(settings.data_root, piece))
    for run_of_tokens in _runs(traced, pieces) if token is None else [range(token, token + 1)]:
        print(f"{_named(run_of_tokens)} {_source(traced, pieces, run_of_tokens, where)}")
    if traced.left_out and token is None:
        verb = "is" if traced.left_out == 1 else "are"
        print(f"{counted(traced.left_out, 'token')} more did not fit and {verb} left out")


def _traced(samples: "Samples | FimSamples", sample: int) -> "Traced":
    import numpy as np

    from tokamake.data.samples.fim.samples import FimSamples, Traced

    if isinstance(samples, FimSamples):
        return samples.traced(sample)
    tokens = samples[sample]
    return Traced(tokens, np.arange(len(tokens)), {}, 0)


def _runs(traced: "Traced", pieces: "list[DocumentSpan]") -> "list[range]":
    """Tokens that come from one piece without a gap, or are padding; marks stand alone."""
    import numpy as np

    from tokamake.data.samples.loader import PAD

    origins, padding = traced.origins, traced.tokens == PAD
    stops = np.cumsum([piece.stop - piece.start for piece in pieces])
    of_one = np.diff(np.searchsorted(stops, origins, side="right")) == 0
    step = np.diff(origins)
    goes_on = (origins[:-1] >= 0) & of_one & (step >= 0) & (step <= 1)
    goes_on |= padding[:-1] & padding[1:]
    bounds = [0, *(np.flatnonzero(~goes_on) + 1).tolist(), len(origins)]
    return [range(*of_run) for of_run in pairwise(bounds)]


def _named(tokens: range) -> str:
    if len(tokens) == 1:
        return f"token {tokens[0]}"
    return f"tokens {tokens[0]} to {tokens[-1]}"


def _source(
    traced: "Traced",
    pieces: "list[DocumentSpan]",
    tokens: range,
    where: "Callable[[DocumentSpan], str]",
) -> str:
    """What a run of tokens comes from, or is if it comes from nothing."""
    first, last = int(traced.origins[tokens[0]]), int(traced.origins[tokens[-1]])
    verb = ("is", "comes") if len(tokens) == 1 else ("are", "come")
    if first < 0:
        mark = traced.marks.get(int(traced.tokens[tokens[0]]))
        what = f"{mark}, put there by train.fim" if mark else "padding"
        return f"{verb[0]} {what}"
    for piece in pieces:
        if first < (size := piece.stop - piece.start):
            break
        first, last = first - size, last - size
    held = _named(range(piece.start + first, piece.start + last + 1))
    return f"{verb[1]} from {held} of {piece.prefix} {where(piece)}"


def _where(data_root: Path, piece: "DocumentSpan") -> str:
    """Sequence, document and raw line of a piece; no line where its pair has no map."""
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.indexed.trace import document_of, origin

    document = document_of(IndexedDataset(data_root / piece.prefix), piece.sequence)
    named = f"sequence {piece.sequence}, document {document}"
    try:
        return f"{named}: {origin(data_root / piece.prefix, document)}"
    except UserError as error:
        return f"{named} ({error})"
