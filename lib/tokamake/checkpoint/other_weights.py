"""Weights that tokamake does not read, recognized by a file or a tensor, with a remedy."""

import re
from pathlib import Path

ADAPTER = "a LoRA adapter (PEFT), no whole model; merge it into its model (PEFT: merge_and_unload)"
QUANTIZED = "quantized weights; dequantize the model (transformers: model.dequantize()), save that"
_AS_HF = "convert it to Hugging Face's format with safetensors"
_FILES = {
    "adapter_*": ADAPTER,
    "*.gguf": f"a GGUF file of llama.cpp; fetch the model that it was made from, or {_AS_HF}",
    "consolidated*.pth": f"a checkpoint in the format of Meta's own code; {_AS_HF}",
    "*.nemo": f"a checkpoint of NeMo; {_AS_HF}",
    "tf_model*.h5": f"weights of TensorFlow; {_AS_HF}",
    "flax_model*.msgpack": f"weights of Flax; {_AS_HF}",
}
_TENSORS = {
    r"base_model\.model\..*|(.*\.)?(lora|vera)_.*": ADAPTER,
    r".*\.(qweight|qzeros|g_idx|SCB|weight_(scale|scale_inv|packed|zero_point))": QUANTIZED,
    r".*\.weight\.(absmax|quant_map|nested_\w+|quant_state\..*)": QUANTIZED,
}


def in_path(path: Path) -> str | None:
    """Describe a file, or the first known one of a folder, with the remedy; None: none is known."""
    for file in sorted(path.iterdir()) if path.is_dir() else [path]:
        for pattern, text in _FILES.items():
            if file.is_file() and file.match(pattern):
                return f"is {text}" if file == path else f"{file.name} is {text}"
    return None


def in_tensor(name: str) -> str | None:
    """Describe what a tensor belongs to that no plain model has, with the remedy."""
    return next((text for pattern, text in _TENSORS.items() if re.fullmatch(pattern, name)), None)
