"""Stage `import_hf`: a Hugging Face checkpoint becomes a Megatron-DeepSpeed one.

Training starts from it.
"""

from pathlib import Path


def import_hf(*, checkpoint: Path, output: Path) -> None:
    """Convert a Hugging Face checkpoint to Megatron-DeepSpeed's layout, bit by bit.

    Args:
        checkpoint: folder with config.json and safetensors.
        output: folder to write; its file `latest` names the checkpoint inside.

    Raises:
        UserError: a file is missing or damaged, or the model is none that can be trained.
    """
    from tokamake.checkpoint import hugging_face, megatron_deepspeed
    from tokamake.checkpoint import tensors as checkpoint_tensors

    architecture, tensors = hugging_face.read(checkpoint)
    megatron_deepspeed.write(output, architecture, tensors)
    print(f"{output}: {checkpoint_tensors.summary(tensors)}, from {checkpoint}")
