"""Ranks that run in images of the user."""

import shutil
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.site_programs import program, rank

IMAGE = "/images/tokamake 1.sif"


PYXIS_IMAGE = "/images/tokamake 1.sqsh"


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("aurora", ["apptainer", "exec", "--bind", str(Path.cwd())]),
        ("polaris", ["apptainer", "exec", "--nv", "--bind", str(Path.cwd())]),
        ("slurm", ["apptainer", "exec", "--nv", "--bind", str(Path.cwd())]),
        ("aws-parallelcluster", ["apptainer", "exec", "--nv", "--bind", str(Path.cwd())]),
        ("perlmutter", ["shifter", "--module=gpu,nccl-plugin", "--image"]),
    ],
)
def test_ranks_run_in_the_users_image(tmp_path: Path, profile: str, words: list[str]) -> None:
    site = tmp_path / "site"
    for name in ("mpiexec", "srun", "apptainer", "shifter", "ls"):
        program(site, name)
    done = rank(profile, site, JOB_CONTAINER=IMAGE, SLURM_JOB_ID="1", MASTER_ADDR="here")
    assert done.stdout.splitlines()[-len(words) - 2 :] == [*words, IMAGE, "true"], done.stderr
    assert "--container" not in done.stdout
    alone = rank(profile, site, SLURM_JOB_ID="1", MASTER_ADDR="here").stdout
    assert words[0] not in alone
    (site / words[0]).unlink()
    missing = rank(profile, site, JOB_CONTAINER=IMAGE, SLURM_JOB_ID="1", MASTER_ADDR="here")
    assert (missing.returncode, missing.stdout) == (2, "")
    has_environment = (ROOT / f"profiles/{profile}/environment.sh").exists()
    place = "environment.sh beside this script" if has_environment else "this script"
    message = f"no {words[0]} on PATH, which runs {IMAGE}; load its module in {place}, or remove"
    assert message in missing.stderr


@pytest.mark.parametrize("image", ["", IMAGE])
def test_nccls_plug_in_of_polaris_is_used_outside_images(tmp_path: Path, image: str) -> None:
    """NCCL stops if `NCCL_NET` names a plug-in that is missing, as in an image."""
    profiles, plugin = tmp_path / "profiles", tmp_path / "plugin"
    shutil.copytree(ROOT / "profiles", profiles)
    plugin.mkdir()
    script = profiles / "polaris/launch.sh"
    folder = "/soft/libraries/aws-ofi-nccl/v1.9.1-aws/lib\n"
    assert f"plugin={folder}" in script.read_text()
    script.write_text(script.read_text().replace(folder, f"{plugin}\n"))
    program(tmp_path / "site", "mpiexec", says='"${NCCL_NET-none}" "${LD_LIBRARY_PATH-none}"')
    program(tmp_path / "site", "apptainer")
    done = rank("polaris", tmp_path / "site", profiles=profiles, JOB_CONTAINER=image)
    net, libraries = done.stdout.splitlines()[:2]
    assert net == ("none" if image else "AWS Libfabric")
    assert (str(plugin) in libraries) == (not image)


@pytest.mark.parametrize("profile", ["slurm", "aws-parallelcluster"])
def test_pyxis_runs_ranks_in_the_users_image(tmp_path: Path, profile: str) -> None:
    program(tmp_path / "site", "srun")
    program(tmp_path / "site", "ls")
    variables = {"SLURM_JOB_ID": "1", "MASTER_ADDR": "here"}
    done = rank(profile, tmp_path / "site", JOB_CONTAINER=PYXIS_IMAGE, **variables)
    assert done.stdout.splitlines()[-5:] == [
        f"--container-image={PYXIS_IMAGE}",
        f"--container-mounts={Path.cwd()}:{Path.cwd()}",
        f"--container-workdir={Path.cwd()}",
        "--container-mount-home",
        "true",
    ], done.stderr
    assert "--container" not in rank(profile, tmp_path / "site", **variables).stdout
