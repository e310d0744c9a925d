"""Tool `trace-sample`: what a training step saw, back to the raw lines that it was made from."""

from pathlib import Path

from tokamake.errors import UserError


def trace_sample(run: Path, step: int, row: int, /, *, token: int | None = None) -> None:
    """Find the raw lines that a row of a training step was made from.

    Args:
        run: settings of the training run, run.yaml in its folder.
        step: training step, from 1, as logs count them.
        row: row of the step's global batch, from 0.
        token: a token of that row, from 0, instead of all; the one after the last input is its
            label.

    Raises:
        UserError: there is no such step, row or token, or the index is missing.
    """
    from tokamake.config import read_run
    from tokamake.data.samples.loader import Samples

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
    samples = Samples(settings.index, split="train", data_root=settings.data_root)
    sample = before + row
    print(f"step {step}, row {row}: sample {sample}, of corpus {samples.source(sample)}")
    if train.fim.rate:
        print("tokens are counted as they are before train.fim rearranges documents")
    begin = 0
    for piece in samples.pieces(sample):
        end = begin + piece.stop - piece.start
        if token is None or begin <= token < end:
            where = _where(settings.data_root, piece.prefix, piece.sequence)
            at = f"tokens {begin} to {end - 1}"
            if token is not None:
                at = f"token {token} is token {piece.start + token - begin} of"
            print(f"{at} {piece.prefix} {where}")
        begin = end


def _where(data_root: Path, prefix: str, sequence: int) -> str:
    """Document and raw line of a sequence; the document alone where its pair has no map."""
    from tokamake.data.pairs.indexed import IndexedDataset
    from tokamake.data.pairs.trace import document_of, origin

    document = document_of(IndexedDataset(data_root / prefix), sequence)
    try:
        return f"document {document}: {origin(data_root / prefix, document)}"
    except UserError as error:
        return f"document {document} ({error})"
