"""The programs that are compared: how each is started with the same tokenizer on the same file.

Megatron-LM's two tools are not on PyPI: give the path of a checkout that has them.
"""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent
_HUGGING_FACE = {
    "merges.txt": {
        "tokenizer_class": "GPT2Tokenizer",
        **dict.fromkeys(("eos_token", "bos_token", "unk_token"), "<|endoftext|>"),
    },
    "vocab.txt": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
}
_MODEL_TYPES = {"merges.txt": "gpt2", "vocab.txt": "bert"}


class Setting(NamedTuple):
    """What all contestants of a comparison share."""

    tokenizer: Path
    workers: int
    append_eod: bool
    megatron: Path | None
    work: Path


class Contestant(NamedTuple):
    """A program: its command for an input and a prefix, and where its pair then is."""

    command: Callable[[Path, Path], list[str]]
    suffix: str
    """What it appends to the prefix."""
    environment: dict[str, str]


def contestants(setting: Setting) -> dict[str, Contestant]:
    """All contestants that can be had, by name; tokamake is first."""
    eod = ["--append-eod" if setting.append_eod else "--no-append-eod"]
    threads = {"RAYON_NUM_THREADS": str(setting.workers)}
    found = {
        "tokamake": Contestant(
            lambda source, prefix: [
                *(sys.executable, "-m", "tokamake", "tokenize", str(source)),
                *("--output", str(prefix), "--tokenizer", str(setting.tokenizer)),
                *("--workers", str(setting.workers), *eod),
            ],
            "",
            {},
        )
    }
    if setting.append_eod and not _holds(setting.tokenizer, "vocab.txt"):
        loop = str(_HERE / "plain_loop.py")
        found["plain loop"] = Contestant(
            lambda source, prefix: [
                *(sys.executable, loop, str(source), str(prefix), str(setting.tokenizer))
            ],
            "",
            threads,
        )
    if setting.megatron:
        found |= _megatron(setting, setting.megatron)
    return found


def _megatron(setting: Setting, checkout: Path) -> dict[str, Contestant]:
    environment = {"PYTHONPATH": str(checkout), "HF_HUB_OFFLINE": "1"}
    threads = {"RAYON_NUM_THREADS": str(setting.workers)}
    shared = [*_megatron_tokenizer(setting), *(["--append-eod"] if setting.append_eod else [])]

    def command(tool: str, *more: str) -> Callable[[Path, Path], list[str]]:
        start = [sys.executable, str(checkout / "tools" / tool), *shared, *more]
        return lambda source, prefix: [
            *(*start, "--input", str(source), "--output-prefix", str(prefix))
        ]

    slow = command("preprocess_data.py", "--workers", str(setting.workers))
    found = {"preprocess_data.py": Contestant(slow, "_text_document", environment)}
    if "HuggingFaceTokenizer" in shared and not _holds(setting.tokenizer, "vocab.txt"):
        # It takes Hugging Face tokenizers alone, and gigatoken has no WordPiece.
        fast = command("preprocess_data_fast.py", "--use-gigatoken")
        found["preprocess_data_fast.py"] = Contestant(fast, "_text_document", environment | threads)
    return found


def _megatron_tokenizer(setting: Setting) -> list[str]:
    """Megatron's options for a tokenizer; it takes vocabularies from a Hugging Face folder."""
    path = setting.tokenizer
    kind = "--tokenizer-type"
    if path.suffix == ".model" or (path.is_dir() and any(path.glob("*.model"))):
        model = path if path.is_file() else next(path.glob("*.model"))
        return [kind, "Llama2Tokenizer", "--tokenizer-model", str(model)]
    folder = setting.work / "hugging-face"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path, folder)
    for name, settings in _HUGGING_FACE.items():
        if _holds(path, name):
            (folder / "tokenizer_config.json").write_text(json.dumps(settings))
            (folder / "config.json").write_text(json.dumps({"model_type": _MODEL_TYPES[name]}))
    # GPT-2's tokenizer adds no special tokens by itself, and is faster without being told so.
    plain = [] if _holds(path, "merges.txt") else ["--tokenizer-hf-no-include-special-tokens"]
    return [kind, "HuggingFaceTokenizer", "--tokenizer-model", str(folder), *plain]


def _holds(path: Path, name: str) -> bool:
    return (path / name).is_file() and not (path / "tokenizer.json").is_file()
