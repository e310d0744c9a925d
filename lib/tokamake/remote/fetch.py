"""Stage `fetch`: download models, tokenizers and datasets by their addresses."""


def fetch(addresses: list[str], /, *, tokenizer: bool = False) -> None:
    """Download files of the Hugging Face Hub, or at https addresses, and print where they are.

    Downloads go to the cache (HF_HOME), where existing files are used again; the working
    directory gets links below results/raw. An interrupted download continues. The workflow
    itself fetches the files of `tokenizer.path` and `model.checkpoint`; it uses files that you have
    fetched. A branch such as main stays at the commit that it had, until you fetch it again.

    Args:
        addresses: hf://ORG/NAME@REVISION for a model, hf://datasets/ORG/NAME@REVISION for a
            dataset, with or without a path or pattern behind it; or https addresses of files.
        tokenizer: of a model, only the files of its tokenizer. At an https address, a file of a
            tokenizer, with the merges or configs beside it.
    """
    from tokamake.errors import UserError
    from tokamake.remote.addresses import parse_address
    from tokamake.remote.download import download, list_files
    from tokamake.remote.hub import link_revision
    from tokamake.remote.hub_models import fetch_model
    from tokamake.remote.local_copy import fetch_tokenizer

    for address in addresses:
        is_hub = address.startswith("hf://")
        is_model = is_hub and parse_address(address).kind == "model"
        if tokenizer and not is_hub:
            print(*fetch_tokenizer(address), sep="\n", flush=True)
            continue
        if tokenizer and not is_model:
            raise UserError(f"{address}: --tokenizer is for models; leave it out")
        listed = fetch_model(address, tokenizer_only=tokenizer) if is_model else None
        files = listed or list_files(address)
        for file in files:
            download(file)
            print(f"{file.path}: {file.size:,} bytes", flush=True)
        if is_hub:
            print(f"{link_revision(address, files[0])}: {address}, files: {len(files):,}")
