"""Hugging Face folders as whole tensors in memory, for evaluation, generation and `init_model`.

`hf.format` reads the files. tokamake's tensor names are those of Hugging Face's Llama.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.hf import config_json
from tokamake.checkpoint.hf import format as hf_format
from tokamake.config.architecture import Architecture

if TYPE_CHECKING:
    from torch import Tensor


def read(folder: Path) -> "tuple[Architecture, dict[str, Tensor]]":
    """Read a folder.

    Returns:
        Architecture, and tensors by tokamake's names, all of one dtype. A tensor that lies in its
        file as tokamake stores it is memory-mapped; fused and transposed ones are copied.

    Raises:
        UserError: as `hf.format.open_checkpoint`, or the tensors differ in dtype.
    """
    checkpoint = hf_format.open_checkpoint(folder)
    source = checkpoint.source
    tensors = {key.removeprefix("model."): source.read(key).contiguous() for key in source}
    model_tensors.common_dtype(tensors, str(folder))
    return checkpoint.architecture, tensors


def write(folder: Path, architecture: Architecture, tensors: "Mapping[str, Tensor]") -> None:
    """Write a folder atomically; an existing one is replaced.

    Args:
        folder: where to write.
        architecture: shape of the model, vocab_size set.
        tensors: by tokamake's names, all of one dtype.

    Raises:
        UserError: transformers has no such model, or the tensors do not fit the architecture.
    """
    from safetensors.torch import save_file

    model_tensors.check_names(tensors, model_tensors.shapes(architecture), str(folder))
    dtype = model_tensors.common_dtype(tensors, str(folder))
    stored = config_json.format_for(architecture).to_hf(architecture, tensors)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in stored.items()}
    with files.atomic_folder(folder) as temporary:
        config_json.write_config(temporary, architecture, dtype, eos_token=None)
        weights = temporary / "model.safetensors"
        save_file(stored, weights, metadata={"format": "pt"})
        # safetensors makes the file readable by its owner alone, whatever the umask is.
        weights.chmod((temporary / "config.json").stat().st_mode & 0o777)
