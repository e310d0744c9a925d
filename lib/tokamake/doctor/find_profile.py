"""Folders of profiles, and the clone of tokamake."""

from difflib import get_close_matches
from pathlib import Path

from tokamake.config_files import read_yaml
from tokamake.errors import UserError

_PROFILE_FILES = ("profile.yaml", "config.v8+.yaml", "config.yaml")
"""Files that make a folder a profile of Snakemake."""
REPOSITORY = Path(__file__).resolve().parents[3]
"""Clone of tokamake, if it is installed from one in place."""
SNAKEFILES = ("workflow/Snakefile", "Snakefile")


def find_profile(profile: str) -> Path:
    """Folder of a profile, given by its path, or by its name.

    Raises:
        UserError: there is none, or its file is no YAML with keys.
    """
    folders = [Path(profile), Path("profiles", profile), REPOSITORY / "profiles" / profile]
    for folder in folders:
        files = [folder / name for name in _PROFILE_FILES if (folder / name).is_file()]
        for path in files:
            if not isinstance(read_yaml(path, "name a profile"), dict):
                raise UserError(f"{path}: has no keys; write KEY: VALUE, an option of Snakemake")
        if files:
            return folder
    known = sorted({*names_in(Path("profiles"), "*/"), *names_in(REPOSITORY / "profiles", "*/")})
    near = get_close_matches(Path(profile).name, known, n=1)
    advice = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}"
    raise UserError(f"--profile {profile}: no profile with this name; {advice}")


def find_repository() -> Path:
    """The clone of tokamake: the one that is installed in place, or this folder.

    Raises:
        UserError: neither has the workflow.
    """
    for folder in (REPOSITORY, Path.cwd()):
        if (folder / SNAKEFILES[0]).is_file():
            return folder
    raise UserError(
        f"{Path.cwd()}: has no workflow/Snakefile; run it in a clone of tokamake, or write a "
        "Snakefile that uses tokamake as a module (docs/howto/module.md)"
    )


def names_in(folder: Path, pattern: str) -> list[str]:
    """Sorted names of the files or folders of a folder that match a pattern."""
    return sorted(path.name for path in folder.glob(pattern))
