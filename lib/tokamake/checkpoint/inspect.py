"""Tool `inspect`: describe a checkpoint, and check that it is complete."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokamake.runtime.console import counted

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokamake.checkpoint.tensors.checkpoint import Checkpoint


def inspect(path: Path, *, tensors: bool = False, values: bool = False) -> None:
    """Print a checkpoint's format, layout, model, progress and size, and check that it is complete.

    Names and sizes of files show missing and truncated files, missing and unknown tensors, and
    wrong shapes. With --values, all numbers are read, too.

    Args:
        path: Folder of the checkpoint, its parent whose file `latest` names it, or a run's folder.
        tensors: List every tensor with its shape and dtype.
        values: Read all tensors: look for NaN and infinity, compare replicated tensors between
            ranks, and verify the checksums in the files.
    """
    from tokamake.checkpoint.detect import open_any, suggesting_other_step

    checkpoint = open_any(path)
    for title, text in _lines(checkpoint):
        print(f"{title:13} {text}")
    if tensors:
        for key, shape in checkpoint.source.shapes.items():
            print(f"{key}  {list(shape)}  {_dtype(checkpoint, key)}")
    if values:
        with suggesting_other_step(path, checkpoint.path):
            _check_values(checkpoint)
        print("values        all finite; replicas are equal; checksums hold")


def _lines(checkpoint: "Checkpoint") -> "Iterator[tuple[str, str]]":
    from tokamake.checkpoint.detect import title
    from tokamake.checkpoint.tensors.checkpoint import Progress

    progress, source = checkpoint.progress, checkpoint.source
    yield "format", f"{title(checkpoint.format)} ({checkpoint.path})"
    yield "layout", str(checkpoint.layout) or "not split"
    yield "model", _model(checkpoint)
    yield "vocabulary", _vocabulary(checkpoint)
    if progress != Progress():
        yield (
            "progress",
            f"step {progress.iteration:,}, {progress.consumed_samples:,} samples, "
            f"{progress.consumed_tokens:,} tokens",
        )
    dtypes = sorted({_dtype(checkpoint, key) for key in source if key.startswith("model.")})
    yield "weights", f"{source.weights_summary}, {', '.join(dtypes)}"
    yield "optimizer", _optimizer(checkpoint)
    yield from _notes(checkpoint.notes)
    num_files = len({extent.file for extent in source.extents})
    yield "files", f"{num_files} with tensors; names and sizes are right"


def _model(checkpoint: "Checkpoint") -> str:
    shape = checkpoint.architecture
    further = shape.num_mtp_layers
    mtp = f"and {counted(further, 'MTP layer')} " if further else ""
    return (
        f"{shape.family}: {shape.num_hidden_layers} layers {mtp}of {shape.hidden_size}, "
        f"MLP {shape.intermediate_size}, {shape.num_attention_heads} heads, "
        f"{shape.num_key_value_heads} of keys and values, {shape.position_embedding} positions up "
        f"to {shape.max_position_embeddings}, embedding "
        f"{'tied' if shape.tie_word_embeddings else 'not tied'}"
    )


def _vocabulary(checkpoint: "Checkpoint") -> str:
    vocab_size, num_rows = checkpoint.architecture.vocab_size, checkpoint.padded_vocab_size
    if checkpoint.is_padding_unknown:
        return f"{vocab_size:,} rows, which may include padding"
    is_padded = num_rows and num_rows != vocab_size
    return f"{vocab_size:,}, stored as {num_rows:,} rows" if is_padded else f"{vocab_size:,}"


def _optimizer(checkpoint: "Checkpoint") -> str:
    kinds = {key.split(".")[1] for key in checkpoint.source if key.startswith("optimizer.")}
    has_masters = any(key.startswith("master.") for key in checkpoint.source)
    masters = ["fp32 weights"] if has_masters else []
    states = ", ".join([*masters, *sorted(kinds), *checkpoint.unread]) or "no states"
    name = checkpoint.notes.get("optimizer")
    return f"{name}: {states}" if name and kinds else states


def _notes(notes: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    scale, steps = notes.get("loss_scale") or (1.0, 0)
    if scale != 1.0:
        yield "loss scale", f"{scale:,.0f}, {steps:,} steps without an overflow"
    if num_ranks := notes.get("world_size"):
        yield "saved by", counted(num_ranks, "rank")
    if (token := notes.get("eos_token_id")) is not None:
        yield "end of text", f"token {token}"
    if (version := notes.get("version")) is not None:
        yield "version", version


def _dtype(checkpoint: "Checkpoint", key: str) -> str:
    return str(checkpoint.source.dtype(key)).removeprefix("torch.")


def _check_values(checkpoint: "Checkpoint") -> None:
    """Read every tensor once, replicas too."""
    from concurrent.futures import ThreadPoolExecutor

    from tokamake.checkpoint.detect import check_checksums
    from tokamake.checkpoint.tensors.chunks import check_replicas, num_not_finite
    from tokamake.errors import UserError
    from tokamake.runtime.console import progress
    from tokamake.runtime.cores import file_workers

    source, workers = checkpoint.source, file_workers()
    check_checksums(checkpoint, workers=workers)
    keys = [*source]
    with ThreadPoolExecutor(workers) as pool:
        counts = pool.map(lambda key: num_not_finite(source, key), keys)
        pairs = zip(keys, counts, strict=True)
        for key, count in progress(pairs, label="reading", total=len(keys)):
            if count:
                raise UserError(
                    f"{checkpoint.path}: {key}: {count:,} values are NaN or infinite; use an "
                    "earlier checkpoint"
                )
    check_replicas(source)
