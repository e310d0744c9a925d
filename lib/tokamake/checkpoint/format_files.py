"""Which files make a checkpoint, told by names alone: the workflow asks, and imports no torch.

`any_format` opens them.
"""

from pathlib import Path

from tokamake.checkpoint.latest import pointed

DESCRIPTION = "tokamake.json"
"""File of tokamake's own checkpoints that says whose they are."""
_OF_HUGGING_FACE = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*")


def start_files(path: Path) -> list[Path]:
    """Files of a checkpoint of any format, the one that names its folder among them.

    Args:
        path: folder of the checkpoint, or one whose `latest` names it.
    """
    if found := hugging_face_files(path):
        return found
    pointer, folder = pointed(path)
    found = sorted(file for file in folder.rglob("*") if file.is_file())
    return [*([pointer] if pointer else []), *found]


def hugging_face_files(path: Path) -> list[Path]:
    """Files of a folder of Hugging Face's, if it is one: config.json, then those with weights."""
    if not (path / "config.json").is_file():
        return []
    weights = {file for pattern in _OF_HUGGING_FACE for file in path.glob(pattern)}
    return [path / "config.json", *sorted(weights)] if weights else []


def is_native(path: Path) -> bool:
    """Whether a checkpoint is tokamake's own, which training reads as it is."""
    return (pointed(path)[1] / DESCRIPTION).is_file()
