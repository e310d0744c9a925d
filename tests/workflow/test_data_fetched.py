"""Corpora behind addresses are downloaded on the login node, and give the bytes of local files."""

import gzip
import json
import shutil
from pathlib import Path

import pyarrow
import pytest
import yaml
from pyarrow import parquet

from tests.support.web_server import Server
from tests.support.workflows import CONFIG, MINE, jobs, make_workspace, snakemake

TABLE = "corpus\tfiles\tweight\n"


def write(home: Path, *, code: str, docs: str, **sections: object) -> None:
    (home / "corpora.tsv").write_text(f"{TABLE}code\t{code}\t2\ndocs\t{docs}\t1\n")
    config = {**CONFIG, **sections}
    del config["sample_corpus"]
    (home / "my.yaml").write_text(yaml.safe_dump(config))


@pytest.fixture
def raw(built: Path, tmp_path: Path) -> Path:
    """Raw files as datasets of the Hub have them: parquet, jsonl.zst, jsonl and json.gz."""
    raw = Path(shutil.copytree(built / "results/raw", tmp_path / "raw"))
    code, docs = raw / "code", raw / "docs"
    lines = [json.loads(line) for line in (code / "code-00.jsonl").read_text().splitlines()]
    parquet.write_table(pyarrow.Table.from_pylist(lines), code / "code-00.parquet")
    (code / "code-00.jsonl").unlink()
    with pyarrow.output_stream(code / "code-01.jsonl.zst", compression="zstd") as stream:
        stream.write(gzip.decompress((code / "code-01.jsonl.gz").read_bytes()))
    (code / "code-01.jsonl.gz").unlink()
    (docs / "docs-01.jsonl.gz").rename(docs / "docs-01.json.gz")
    return raw


@pytest.fixture
def home(raw: Path, server: Server) -> Path:
    """A workspace whose corpora are on a server: one on the Hub, one at web addresses."""
    home = make_workspace(Path.cwd())
    server.repositories["datasets/org/code"] = {
        f"data/{path.name}": path.read_bytes() for path in (raw / "code").iterdir()
    }
    server.large = {"data/code-00.parquet", "data/code-01.jsonl.zst"}
    for path in (raw / "docs").iterdir():
        server.files[f"/{path.name}"] = path.read_bytes()
    docs = " ".join(f"{server.url}/{path.name}" for path in sorted((raw / "docs").iterdir()))
    write(home, code="hf://datasets/org/code", docs=docs)
    return home


@pytest.mark.grid
@pytest.mark.slow
def test_a_run_of_addresses_has_the_bytes_of_a_run_of_local_files(
    home: Path, raw: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = snakemake(home, "-n", *MINE, "describe")
    assert "tokamake: 4 files behind addresses, " in planned.stderr
    assert jobs(planned)["fetch"] == 6  # five batches, and the tokenizer
    assert not (home / "results").exists()
    server.cuts, server.refusals = [20_000, 1000], [429]
    result = snakemake(home, *MINE, "describe")
    assert result.returncode == 0, result.stdout + result.stderr
    gets = [request for request in server.downloads() if "/api/" not in request]
    assert len({request.split()[1] for request in gets}) == 4

    # Without a network, nothing is left to be done, and data that broke are made again.
    server.repositories.clear()
    server.files.clear()
    before = len(server.requests)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "Nothing to be done" in snakemake(home, *MINE, "describe").stderr
    next(home.glob("results/data/shards/code/*.bin")).unlink()
    planned = jobs(snakemake(home, "-n", *MINE, "describe"))
    assert (planned["tokenize"], planned["fetch"]) == (1, 1)  # finds its file in the cache
    result = snakemake(home, *MINE, "describe")
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(server.requests) == before

    merged = {path.name: path.read_bytes() for path in home.glob("results/data/merged/*.bin")}
    shutil.copytree(raw, home / "raw")
    write(home, code="raw/code/*", docs="raw/docs/*", data_set="local", run="local")
    result = snakemake(home, *MINE, "describe")
    assert result.returncode == 0, result.stdout + result.stderr
    local = {path.name: path.read_bytes() for path in home.glob("results/data/local/merged/*.bin")}
    assert local == merged


@pytest.mark.grid
@pytest.mark.slow
def test_an_emptied_cache_is_filled_again_where_it_is_needed(home: Path, tmp_path: Path) -> None:
    """Neither the tokenizer nor what is finished is made again."""
    result = snakemake(home, *MINE, "results/data/batches/merge/code-00000.json")
    assert result.returncode == 0, result.stdout + result.stderr
    shutil.rmtree(tmp_path / "cache")
    result = snakemake(home, *MINE, "results/data/batches/merge/code-00000.json")
    assert "Nothing to be done" in result.stderr
    # A finished batch that broke, and others that were never made.
    (home / "results/data/shards/code/00000.bin").unlink()
    planned = jobs(snakemake(home, "-n", *MINE, "results/data/batches/merge/code-00000.json"))
    assert planned == {"fetch": 1, "tokenize": 1, "merge": 1}
    planned = jobs(snakemake(home, "-n", *MINE, "describe"))
    assert "train_tokenizer" not in planned
    assert planned["fetch"] == planned["tokenize"] == 5
    result = snakemake(home, *MINE, "describe")
    assert result.returncode == 0, result.stdout + result.stderr
    # Other settings tokenize all again, from files that are fetched again.
    shutil.rmtree(tmp_path / "cache")
    config = yaml.safe_load((home / "my.yaml").read_text())
    config["tokenize"] = {"append_eod": False, "deduplicate": True}
    (home / "my.yaml").write_text(yaml.safe_dump(config))
    result = snakemake(home, *MINE, "describe")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "Nothing to be done" in snakemake(home, *MINE, "describe").stderr


def test_a_wrong_address_is_one_line_at_the_dry_run(home: Path, server: Server) -> None:
    def refused(code: str) -> str:
        write(home, code=code, docs=f"{server.url}/docs-00.jsonl")
        result = snakemake(home, "-n", *MINE, "describe")
        assert result.returncode == 2, result.stdout + result.stderr
        return result.stderr.splitlines()[-1]

    where = "tokamake: corpora.tsv:2: files: "
    assert refused("hf://datasets/org/none/x") == (
        f"{where}hf://datasets/org/none/x: no such repository, or a private one; fix the name, or "
        "set HF_TOKEN, or log in with `hf auth login`, and accept its terms on its page"
    )
    assert refused("hf://datasets/org/code/none").startswith(
        f"{where}hf://datasets/org/code/none: no file of the repository matches; it has data/code-"
    )
    address = f"{server.url}/none.jsonl"
    assert (
        refused(address) == f"{where}{address}: the server answers 404 Not Found; fix the address"
    )
