"""The conda environment of the rules: with `--sdm conda`, it has this tokamake, and jobs use it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT
from tests.support.snakemake_server import start
from tests.support.workflows import MINE, make_workspace

ENVIRONMENT = ROOT / "workflow/envs/tokamake.yaml"
POST_DEPLOY = ROOT / "workflow/envs/tokamake.post-deploy.sh"
CONDA = r"""#!/usr/bin/env bash
# The commands of conda that Snakemake calls. A new environment has a python and a tokamake that
# note how they are called.
prefix=$(dirname "$(dirname "$0")")
case "$*" in
    "info --json") echo "{\"conda_prefix\": \"$prefix\", \"platform\": \"linux-64\"}" ;;
    --version) echo "conda 24.11.0" ;;
    config*) echo '{"get": {"channel_priority": "strict"}}' ;;
    "env create"*)
        folder=${!#}
        mkdir -p "$folder/bin"
        cat > "$folder/bin/python" <<END
#!/bin/sh
echo "\$* PIP_CONSTRAINT=\$PIP_CONSTRAINT" >> $prefix/pip
END
        cat > "$folder/bin/tokamake" <<END
#!/bin/sh
echo "\$1" >> $prefix/called
exec $TOKAMAKE "\$@"
END
        chmod +x "$folder"/bin/* ;;
    clean*) ;;
    *) exit 1 ;;
esac
"""


@pytest.fixture
def conda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of a stand-in for conda, which is first on PATH."""
    folder = tmp_path / "conda"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/conda").write_text(CONDA)
    (folder / "bin/conda").chmod(0o755)
    (folder / "bin/activate").write_text('export CONDA_PREFIX="$1" PATH="$1/bin:$PATH"\n')
    monkeypatch.setenv("PATH", f"{folder}/bin", prepend=os.pathsep)
    monkeypatch.setenv("PIP_DRY_RUN", "1")
    monkeypatch.setenv("TOKAMAKE", f"{sys.prefix}/bin/tokamake")
    return folder


def test_the_environment_is_a_conda_environment_file() -> None:
    environment = yaml.safe_load(ENVIRONMENT.read_text())
    assert environment.keys() == {"channels", "dependencies"}
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    names = [dependency.split()[0] for dependency in environment["dependencies"]]
    assert names == ["python", "pip", "cxx-compiler"]


def test_the_checkout_can_be_installed_into_the_environment() -> None:
    settings = {"PIP_DRY_RUN": "1", "PIP_NO_DEPS": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    folders = {"CONDA_PREFIX": sys.prefix, "TOKAMAKE_REPOSITORY": str(ROOT)}
    done = subprocess.run(
        ["bash", POST_DEPLOY], capture_output=True, text=True, check=False,
        env={**os.environ, **settings, **folders},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Would install tokamake-" in done.stdout


def test_jobs_run_in_the_environment(tmp_path: Path, conda: Path) -> None:
    (tmp_path / "work").mkdir()
    folder = make_workspace(tmp_path / "work")
    arguments = ("--profile", "profiles/local", "--sdm", "conda", *MINE, "sample_corpus")
    done = start(arguments, folder, dict(os.environ))
    assert done.returncode == 0, done.stdout + done.stderr
    pip = f"-m pip install torch --editable {ROOT}[all] PIP_CONSTRAINT={ROOT}/constraints.txt\n"
    assert (conda / "pip").read_text().endswith(pip)
    assert (conda / "called").read_text() == "sample-corpus\n"
    done = start((*arguments[:4], "-n", *arguments[4:]), folder, dict(os.environ))
    assert "Nothing to be done" in done.stdout + done.stderr
