"""Interface of a checkpoint format: constants and functions of a module `checkpoint/**/format.py`.

A format is a folder with a module `format.py`. The name of the folder is the name of the format; in
the config and on the command line, its underscores are hyphens. Only the contract of layers in
pyproject.toml names the formats, too.

This module is not in `tensors/`: it describes what formats owe to `convert`, `inspect` and the
workflow, while `tensors/` knows files and tensors, but no formats.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tokamake.checkpoint.tensors.checkpoint import Checkpoint, Target
from tokamake.checkpoint.tensors.extents import Extent


class CheckpointFormat(Protocol):
    """Module of a format. mypy checks each module against it (see the end of a `format.py`).

    A module may also have `complete(folder)`, which is called when all tensors are in the files.

    The constants are literals: `plugins.constant` reads them without importing the module.
    """

    TITLE: str
    """Name of the format in messages."""
    SUMMARY: str
    """The format in the help text of `convert`, with the optimizer states that it holds."""
    PRIORITY: int
    """Order of detection: the format with the smallest number whose `find` succeeds is opened."""
    SIZES: Mapping[str, int | None]
    """Options of `convert` that split a checkpoint of this format, such as tensor_parallel_size,
    with the largest value of each; None: any."""
    EQUAL_STAGES: bool
    """Whether all pipeline stages must have the same number of layers."""
    DTYPE: str | None
    """The only dtype of weights in this format, such as fp32; None: any."""
    TOKENIZER_CONFIG: str | None
    """File that names the end-of-text token of the tokenizer whose files lie beside the weights;
    None: the format keeps no tokenizer."""
    IN_ROOT: bool
    """Whether files go into `global_step<N>` of a root folder with a file `latest`."""
    STEP_FOLDER: str | None
    """Pattern of the names of folders of steps in a root folder, with the step as its group; None:
    the format has no root folder."""
    POINTER: str | None
    """File in a root folder that names the folder of a step; None: the format has none."""
    NUMBERED_FOLDER: str | None
    """Name of the folder if the pointer file holds only a number, such as iter_{:07d}; None: it
    always holds a name."""
    NEAR_MISSES: Mapping[tuple[str, ...], str]
    """Patterns of files that a folder of a related, unsupported kind has, all of them, and what is
    wrong, for the message that no format is known."""

    def find(self, path: Path) -> Path | None:
        """Return the folder of the checkpoint, or None if there is none of this format.

        Args:
            path: the folder itself, or its parent with a pointer file such as `latest`.
        """

    def list_files(self, path: Path) -> list[Path]:
        """List the files of a checkpoint that `find` accepts, with the pointer file, by name alone.

        The workflow takes them as inputs of its rules.
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

        Archives have checksums: `convert` writes them, and verifies those of its source.
        """

    def warnings(self, checkpoint: Checkpoint) -> list[str]:
        """Return warnings for the user who has written `checkpoint` in this format."""
