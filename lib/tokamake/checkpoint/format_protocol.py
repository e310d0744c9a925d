"""Interface of a checkpoint format: constants and functions of a module `checkpoint/**/format.py`.

A format is a folder with a module `format.py`. The name of the folder is the name of the format; in
the config and on the command line, its underscores are hyphens. Only the contract of layers in
pyproject.toml names the formats, too.

This module is not in `tensors/`: it describes the duties of formats to `convert`, `inspect` and
the workflow, while `tensors/` knows files and tensors, but no formats.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.extents import Extent


class CheckpointFormat(Protocol):
    """Module of a format. mypy checks each module against it (see the end of a `format.py`).

    The constants are literals: `plugins.constant` reads them without importing the module. A module
    may also have these:

    SIZES: options of `convert` that split a checkpoint of this format, such as
        tensor_parallel_size, with the largest value of each; None: any.
    EQUAL_STAGES: whether all pipeline stages must have the same number of layers.
    DTYPE: the only dtype of weights in this format, such as fp32.
    TOKENIZER_CONFIG: file that names the end-of-text token of the tokenizer whose files lie beside
        the weights. Without it, the format keeps no tokenizer.
    IN_ROOT: whether files go into `global_step<N>` of a root folder with a file `latest`.
    STEP_FOLDER: pattern of the folders of steps in a root folder, with the step as its group.
    POINTER: file in a root folder that names the folder of a step.
    NUMBERED_FOLDER: name of the folder if the pointer file holds only a number: iter_{:07d}.
    NEAR_MISSES: patterns of files that a folder of a related, unsupported kind has, all of them,
        and the reason, for the message that no format is known.
    list_files(path): the files of a checkpoint that `find` accepts, by name alone, which the
        workflow takes as inputs of its rules; by default, `latest.pointed_files`.
    complete(folder): called when all tensors are in the files.
    """

    TITLE: str
    """Name of the format in messages."""
    SUMMARY: str
    """The format in the help text of `convert`, with the optimizer states that it holds."""
    PRIORITY: int
    """Order of detection: the format with the smallest number whose `find` succeeds is opened."""

    def find(self, path: Path) -> Path | None:
        """Return the folder of the checkpoint, or None if there is none of this format.

        Args:
            path: the folder itself, or its parent with a pointer file such as `latest`.
        """

    def open_checkpoint(self, folder: Path) -> Checkpoint:
        """Open the folder that `find` returned. Tensors stay on disk.

        Raises:
            UserError: a file is missing or damaged, or no family covers the model.
        """

    def lay_out(self, folder: Path, checkpoint: Checkpoint, *, target: Target) -> list[Extent]:
        """Write all files of a checkpoint into an empty folder, with holes in place of the tensors.

        Return where the tensors go; the caller fills them in. A UserError says that the format
        cannot hold the model in this layout.
        """

    def archives(self, files: Iterable[Path]) -> Mapping[Path, list[tuple[int, int]]]:
        """Return first byte and length of each archive of torch.save in files of a checkpoint.

        Archives have checksums: `convert` writes them, and verifies the source's.
        """

    def warnings(self, checkpoint: Checkpoint) -> list[str]:
        """Return warnings for the user who has written `checkpoint` in this format."""
