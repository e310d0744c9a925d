"""The tool `inspect`: what a checkpoint is, in words, and whether it is whole."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokamake.checkpoint.tensors.checkpoint import Checkpoint


def inspect(path: Path, *, tensors: bool = False, values: bool = False) -> None:
    """Tell a checkpoint's format, layout, model, progress and size, and check that it is whole.

    Missing files, missing or unknown tensors, wrong shapes and files that were cut off are found
    from names and sizes alone; with --values all numbers are read, too.

    Args:
        path: Folder of the checkpoint, or one whose file `latest` names it.
        tensors: List every tensor with its shape and number format.
        values: Read all tensors: look for NaN and infinity, and compare what ranks have alike, and
            files with the checksums in them.

    Raises:
        UserError: there is none, it is damaged, or its values are.
    """
    from tokamake.checkpoint.detect import open_any, suggesting_other_step

    found = open_any(path)
    for title, text in _lines(found):
        print(f"{title:13} {text}")
    if tensors:
        for key, shape in found.source.shapes.items():
            print(f"{key}  {list(shape)}  {_dtype(found, key)}")
    if values:
        with suggesting_other_step(path, found.path):
            _check_values(found)
        print("values        all finite; copies on other ranks are alike; checksums hold")


def _lines(found: "Checkpoint") -> "Iterator[tuple[str, str]]":
    from math import prod

    from tokamake.checkpoint.detect import title
    from tokamake.checkpoint.tensors.checkpoint import Progress

    shape, progress = found.architecture, found.progress
    yield "format", f"{title(found.format)} ({found.path})"
    yield "layout", str(found.layout) or "in one part"
    yield (
        "model",
        f"{shape.family}: {shape.num_hidden_layers} layers of {shape.hidden_size}, "
        f"MLP {shape.intermediate_size}, {shape.num_attention_heads} heads, "
        f"{shape.num_key_value_heads} of keys and values, {shape.position_embedding} positions up "
        f"to {shape.max_position_embeddings}, embedding "
        f"{'tied' if shape.tie_word_embeddings else 'not tied'}",
    )
    padded = found.padded_vocab_size
    more = f", stored as {padded:,} rows" if padded and padded != shape.vocab_size else ""
    more = " rows, padding among them if there is any" if found.is_padding_unknown else more
    yield "vocabulary", f"{shape.vocab_size:,}{more}"
    if progress != Progress():
        yield (
            "progress",
            f"step {progress.iteration:,}, {progress.consumed_samples:,} samples, "
            f"{progress.consumed_tokens:,} tokens",
        )
    weights = [key for key in found.source if key.startswith("model.")]
    count = sum(prod(found.source.shapes[key]) for key in weights)
    kinds = sorted({_dtype(found, key) for key in weights})
    yield "weights", f"{count:,} parameters in {len(weights)} tensors, {', '.join(kinds)}"
    yield "optimizer", _optimizer(found)
    yield from _told(found.notes)
    count = len({region.file for region in found.source.regions})
    yield "files", f"{count} with tensors; all that names and sizes tell is right"


def _optimizer(found: "Checkpoint") -> str:
    """States that are there, and those that are not read."""
    kinds = {key.split(".")[1] for key in found.source if key.startswith("optimizer.")}
    masters = ["fp32 weights"] * any(key.startswith("master.") for key in found.source)
    told = ", ".join([*masters, *sorted(kinds), *found.unread]) or "no states"
    name = found.notes.get("optimizer")
    return f"{name}: {told}" if name and kinds else told


def _told(notes: dict[str, Any]) -> "Iterator[tuple[str, str]]":
    """What a format tells besides, in words."""
    scale, steps = notes.get("loss_scale") or (1.0, 0)
    if scale != 1.0:
        yield "loss scale", f"{scale:,.0f}, {steps:,} steps without an overflow"
    if ranks := notes.get("world_size"):
        yield "saved by", f"{ranks:,} rank{'s' * (ranks > 1)}"
    if (token := notes.get("eos_token_id")) is not None:
        yield "end of text", f"token {token}"
    if (version := notes.get("checkpoint_version")) is not None:
        yield "version", f"{version} of Megatron's checkpoints"


def _dtype(found: "Checkpoint", key: str) -> str:
    return str(found.source.dtype(key)).removeprefix("torch.")


def _check_values(found: "Checkpoint") -> None:
    """Read every tensor once, copies too.

    Raises:
        UserError: a value is not finite, a copy differs, or a checksum does.
    """
    from concurrent.futures import ThreadPoolExecutor

    from tokamake.checkpoint.checksums import check_checksums
    from tokamake.checkpoint.tensors.chunks import num_not_finite
    from tokamake.checkpoint.tensors.replicas import check_copies
    from tokamake.errors import UserError
    from tokamake.runtime.console import progress
    from tokamake.runtime.cores import file_workers

    workers, keys = file_workers(), [*found.source]
    check_checksums(found.source, workers=workers)
    with ThreadPoolExecutor(workers) as pool:
        counts = pool.map(lambda key: num_not_finite(found.source, key), keys)
        told = progress(zip(keys, counts, strict=True), label="reading", total=len(keys))
        for key, count in told:
            if count:
                raise UserError(
                    f"{found.path}: {key}: {count:,} values are NaN or infinite; take an earlier "
                    "checkpoint"
                )
    check_copies(found.source)
