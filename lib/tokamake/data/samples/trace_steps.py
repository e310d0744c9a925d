"""Tool `trace-steps`: the training steps that see a document of a pair."""

from pathlib import Path

from tokamake.errors import UserError


def trace_steps(run: Path, prefix: str, document: int, /) -> None:
    """List the steps and rows of a training run that hold a token of a document.

    Args:
        run: settings of the training run, run.yaml in its folder.
        prefix: pair, as the weighting file names it: relative to the data root.
        document: number of the document, from 0.

    Raises:
        UserError: the run draws from no such pair, the pair has no such document, or the index is
            missing.
    """
    import numpy as np

    from tokamake.config.resolved_run import read_run
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.samples.index_folder import read_index
    from tokamake.data.samples.loader import Samples
    from tokamake.runtime.console import counted

    settings = read_run(run)
    known = read_index(settings.index)["pairs"]
    if prefix not in known:
        raise UserError(f"{run}: draws from no pair {prefix}; name one of {', '.join(known)[:300]}")
    pair = IndexedDataset(settings.data_root / prefix)
    if not 0 <= document < len(pair.document_bounds) - 1:
        last = len(pair.document_bounds) - 2
        raise UserError(f"{prefix}: no document {document}; give 0 to {last}")
    samples = Samples(settings.index, split="train", data_root=settings.data_root)
    first, stop = (int(bound) for bound in pair.document_bounds[document : document + 2])
    seen = [samples.seen(prefix, sequence) for sequence in range(first, stop)]
    found = np.unique(np.concatenate([np.zeros(0, np.int64), *seen]))
    sizes = settings.train.batch_sizes
    found = found[found < sizes.samples(settings.train.train_steps)]
    print(f"document {document} of {prefix}: {counted(len(found), 'sample')}")
    for sample in found.tolist():
        step, row = sizes.step_and_row(sample)
        print(f"step {step + 1}, row {row}")
