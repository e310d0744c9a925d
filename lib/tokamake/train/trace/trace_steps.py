"""Tool `trace-steps`: the training steps that see a document of a dataset."""

from pathlib import Path

from tokamake.errors import UserError


def trace_steps(run: Path, prefix: str, document: int, /) -> None:
    """List the steps and rows of a training run that hold a token of a document.

    Args:
        run: folder of the training run, or the run.yaml in it.
        prefix: dataset as in the weighting file, relative to the data root.
        document: number of the document, from 0.
    """
    import numpy as np

    from tokamake.config.resolved_run import read_run
    from tokamake.data.indexed.dataset import IndexedDataset
    from tokamake.data.samples.index_folder import read_index
    from tokamake.data.samples.loader import open_samples
    from tokamake.runtime.console import counted
    from tokamake.train.trace.trained_spans import trained_spans

    run = run / "run.yaml" if run.is_dir() else run
    settings = read_run(run)
    prefixes = read_index(settings.index)["pairs"]
    if prefix not in prefixes:
        raise UserError(f"{run}: no dataset {prefix}; choose one of {', '.join(prefixes)[:300]}")
    dataset = IndexedDataset(settings.data_root / prefix)
    if not 0 <= document < len(dataset.document_bounds) - 1:
        last = len(dataset.document_bounds) - 2
        raise UserError(f"{prefix}: no document {document}; give 0 to {last}")
    samples = open_samples(settings.index, split="train", data_root=settings.data_root)
    first, stop = (int(bound) for bound in dataset.document_bounds[document : document + 2])
    of_sequences = [samples.samples_of(prefix, sequence) for sequence in range(first, stop)]
    # The empty array is for documents without sequences: nothing to concatenate is an error.
    numbers = np.unique(np.concatenate([np.zeros(0, np.int64), *of_sequences]))
    parts = trained_spans(settings)
    numbers = numbers[numbers < parts[-1].num_samples]
    print(f"document {document} of {prefix}: {counted(len(numbers), 'sample')}")
    for part in parts:
        if part.samples == "changed":
            print(f"steps up to {part.last_step} had other data, which the index does not know")
        elif part.samples == "perhaps changed":
            print(
                f"steps up to {part.last_step} may have had other samples: "
                "the run had another length"
            )
        elif part.sizes is None:
            print(f"steps up to {part.last_step}: no checkpoint with their batch size is left")
    for sample in numbers.tolist():
        part = next(part for part in parts if sample < part.num_samples)
        if part.sizes is None or part.samples == "changed":
            continue
        step, row = part.sizes.step_and_row(sample)
        print(f"step {step + 1}, row {row}")
