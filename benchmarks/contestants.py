"""The compared programs: the command of each for the same tokenizer and the same file.

Megatron-LM's two tools are not on PyPI; they need the path of a checkout.
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
    """Settings that all contestants of a comparison share."""

    tokenizer: Path
    workers: int
    append_eod: bool
    megatron: Path | None
    work: Path


class Contestant(NamedTuple):
    """A program that tokenizes a file."""

    command: Callable[[Path, Path], list[str]]
    """Function of the input file and the output prefix that returns the command."""
    suffix: str
    """Suffix that the program appends to the prefix."""
    environment: dict[str, str]
    """Additional environment variables."""


def contestants(setting: Setting) -> dict[str, Contestant]:
    """All available contestants by name; tokamake is first."""
    eod = ["--append-eod" if setting.append_eod else "--no-append-eod"]
    threads = {"RAYON_NUM_THREADS": str(setting.workers)}
    by_name = {
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
        by_name["plain loop"] = Contestant(
            lambda source, prefix: [
                *(sys.executable, loop, str(source), str(prefix), str(setting.tokenizer))
            ],
            "",
            threads,
        )
    if setting.megatron:
        by_name |= _megatron(setting, setting.megatron)
    return by_name


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
    by_name = {"preprocess_data.py": Contestant(slow, "_text_document", environment)}
    if "HuggingFaceTokenizer" in shared and not _holds(setting.tokenizer, "vocab.txt"):
        # It supports Hugging Face tokenizers only, and gigatoken has no WordPiece.
        fast = command("preprocess_data_fast.py", "--use-gigatoken")
        environment = environment | threads
        by_name["preprocess_data_fast.py"] = Contestant(fast, "_text_document", environment)
    return by_name


def _megatron_tokenizer(setting: Setting) -> list[str]:
    """Megatron's options for a tokenizer; vocabularies become a Hugging Face folder."""
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
    # GPT-2's tokenizer adds no special tokens, and it is faster without this option.
    plain = [] if _holds(path, "merges.txt") else ["--tokenizer-hf-no-include-special-tokens"]
    return [kind, "HuggingFaceTokenizer", "--tokenizer-model", str(folder), *plain]


def _holds(path: Path, name: str) -> bool:
    return (path / name).is_file() and not (path / "tokenizer.json").is_file()
