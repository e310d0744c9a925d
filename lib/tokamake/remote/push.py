"""Stage `push`: upload an exported model to the Hugging Face Hub."""

from pathlib import Path


def push(
    folder: Path, address: str, /, *, private: bool = True, output: Path | None = None
) -> None:
    """Upload a folder to a model's repository on the Hugging Face Hub, in one commit.

    The repository is made if there is none. HF_TOKEN, or `hf auth login`, gives the right to write.

    Args:
        folder: exported model.
        address: hf://ORG/NAME, or hf://ORG/NAME@BRANCH for a branch that exists.
        private: whether a new repository is private.
        output: JSON file that names the commit, written at the end.
    """
    from huggingface_hub import HfApi

    from tokamake.errors import UserError
    from tokamake.files import write_json
    from tokamake.remote.addresses import check_online, parse_address
    from tokamake.remote.hub import endpoint, explained

    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: has no config.json; name the folder of an exported model")
    parsed = parse_address(address) if address.startswith("hf://") else None
    if parsed is None or parsed.kind != "model" or parsed.path:
        raise UserError(f"{address}: write hf://ORG/NAME, or hf://ORG/NAME@BRANCH")
    check_online(address, "upload to it")
    api = HfApi(endpoint=endpoint())
    with explained(address):
        api.create_repo(parsed.repository, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=parsed.repository,
            folder_path=folder,
            revision=parsed.revision,
            commit_message="Upload a model trained by tokamake",
            ignore_patterns=[".snakemake*"],  # Snakemake marks the folders that jobs write
        )
    if output:
        write_json(
            output, {"address": address, "commit": commit.oid, "url": str(commit.commit_url)}
        )
    print(f"{folder}: uploaded to {commit.commit_url}")
