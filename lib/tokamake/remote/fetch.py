"""Tool `fetch`: download models, tokenizers and datasets, for configs that name them by address."""

_WEIGHTS = ("model*.safetensors", "model*.safetensors.index.json")
_PICKLED_WEIGHTS = ("pytorch_model*.bin", "pytorch_model.bin.index.json")
_TOKENIZER = (
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*"),
    *("vocab.*", "merges.txt", "*.model", "additional_chat_templates/*.jinja"),
)
_MODEL = ("config.json", "generation_config.json", *_TOKENIZER)


def fetch(addresses: list[str], /, *, tokenizer: bool = False) -> None:
    """Download files of the Hugging Face Hub, or at https addresses, and print where they are.

    Downloads go to the cache (HF_HOME), where existing files are used again; the working
    directory gets links below results/raw. An interrupted download continues. Afterwards a config
    can name the same address in `tokenizer.path` and `model.checkpoint`, and needs no network. A
    branch such as main stays at the commit that it had, until you fetch it again.

    Args:
        addresses: hf://ORG/NAME@REVISION for a model, hf://datasets/ORG/NAME@REVISION for a
            dataset, with or without a path or pattern behind it; or https addresses of files.
        tokenizer: of a model, only the files of its tokenizer.

    Raises:
        UserError: there is no such file, it cannot be downloaded, or differs from what was listed.
    """
    from tokamake.errors import UserError
    from tokamake.remote.download import download, list_files
    from tokamake.remote.hub import link_revision
    from tokamake.remote.hub_address import parse_address

    for address in addresses:
        is_hub = address.startswith("hf://")
        if tokenizer and not (is_hub and parse_address(address).kind == "model"):
            raise UserError(f"{address}: --tokenizer is for models; leave it out")
        files = list_files(address)
        if is_hub and (parsed := parse_address(address)).kind == "model" and not parsed.path:
            names = _TOKENIZER if tokenizer else _MODEL
            files = _select(files, names, address=address, tokenizer_only=tokenizer)
        for file in files:
            download(file)
            print(f"{file.path}: {file.size:,} bytes", flush=True)
        if is_hub:
            print(f"{link_revision(address, files[0])}: {address}, files: {len(files):,}")


def _select(files: list, names: tuple[str, ...], *, address: str, tokenizer_only: bool) -> list:
    """Files of a model that tokamake reads: weights in one form, its config and its tokenizer."""
    from fnmatch import fnmatch

    from tokamake.errors import UserError
    from tokamake.remote.hub_address import parse_address

    def matching(patterns: tuple[str, ...]) -> list:
        paths = {parse_address(file.url).path: file for file in files}
        return [f for path, f in paths.items() if any(fnmatch(path, each) for each in patterns)]

    weights = (matching(_WEIGHTS) or matching(_PICKLED_WEIGHTS)) if not tokenizer_only else []
    if not tokenizer_only and not weights:
        raise UserError(
            f"{address}: has no model*.safetensors or pytorch_model*.bin; name files by a pattern, "
            "or only the tokenizer with --tokenizer"
        )
    if not (others := matching(names)):
        missing = "file of a tokenizer" if tokenizer_only else "config.json and no tokenizer"
        raise UserError(f"{address}: has no {missing}; name files by a pattern")
    return [*others, *weights]
