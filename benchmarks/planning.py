"""Measure Snakemake's planning of the workflow with very many raw files.

    python benchmarks/planning.py --files 100000 --work benchmark-work
    python benchmarks/planning.py --files 100000 --work benchmark-work --clean

Makes a corpus of small jsonl files, one shard each. Measures a dry run before anything is
built, the build up to the index, a run with nothing to do, and a dry run after one raw file has
changed. Printed figures are medians. With `--clean`, the corpus has filters and drops duplicates,
near-duplicates and repeated text; only the dry run is measured.
"""

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from statistics import median

import measure

ROOT = Path(__file__).parent.parent
TARGET = "results/planned/index/index.json"
_FOLDER_FILES = 1000
_CONFIG = {
    "run": "planned",
    "corpora": "corpora.tsv",
    "tokenizer": {"vocab_size": 500, "train_bytes": 1_000_000},
    "plan": {"shard_bytes": 1200, "merged_bytes": 500_000},
    "model": {"architecture": "config/models/tiny-llama.yaml"},
    "train": {"sequence_length": 32, "global_batch_size": 8, "train_steps": 10, "split": "90,5,5"},
}
_CLEAN = {
    "filters": [{"language": "en"}, "gopher_quality", "c4", "fineweb", "pii"],
    "deduplicate": "data",
    "near_duplicates": "fineweb",
    "repeats": "paragraphs",
}


def main() -> None:
    """Measure and print a line per run."""
    options = _options()
    folder = make_folder(options.work, options.files)
    if options.clean:
        (folder / "config.json").write_text(json.dumps(_CONFIG | {"tokenize": _CLEAN}))
    show(f"dry run of {options.files:,} raw files", runs(folder, options.rounds, "-n", TARGET))
    if options.clean:
        print(jobs((folder / "log").read_text()))
        return
    show("building up to the index", runs(folder, 1, TARGET))
    show("nothing to be done", runs(folder, options.rounds, TARGET))
    assert "Nothing to be done" in (folder / "log").read_text()
    changed = folder / name_of(options.files // 2)
    changed.write_text(json.dumps({"text": "another text " * 90}) + "\n")
    show("dry run, one raw file changed", runs(folder, options.rounds, "-n", TARGET))
    print(jobs((folder / "log").read_text()))


def make_folder(folder: Path, files: int) -> Path:
    """Make a user's folder with a corpus of small files; an existing folder is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in ("workflow", "profiles", "config"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    (folder / "corpora.tsv").write_text("corpus\tfiles\ttext_key\tweight\nall\traw/*/*\ttext\t1\n")
    for number in range(files):
        path = folder / name_of(number)
        if not number % _FOLDER_FILES:
            path.parent.mkdir(parents=True)
        path.write_text(json.dumps({"text": f"text number {number} " * 60}) + "\n")
    return folder


def name_of(number: int) -> str:
    """Path of a raw file."""
    return f"raw/{number // _FOLDER_FILES:03}/{number:06}.jsonl"


def runs(folder: Path, rounds: int, *arguments: str) -> list[measure.Cost]:
    """Run Snakemake `rounds` times.

    Raises:
        SystemExit: a run failed.
    """
    line = command(folder, *arguments)
    costs = []
    for _ in range(rounds):
        cost = measure.run(line, log=folder / "log", environment={})
        if cost.status:
            sys.exit((folder / "log").read_text()[-3000:])
        costs.append(cost)
    return costs


def command(folder: Path, *arguments: str, checkout: Path | None = None) -> list[str]:
    """Return the arguments that run Snakemake in a folder, with the workflow of a checkout.

    The default is the workflow beside this file, with the Python that runs it.
    """
    python = str(checkout / ".venv/bin/python") if checkout else sys.executable
    line = f"--snakefile {checkout or ROOT}/workflow/Snakefile --directory {folder} --cores 2"
    words = [python, "-m", "snakemake", *line.split(), *arguments[:-1]]
    words += ["--scheduler", "greedy", "--default-resources", "launch='profiles/local/launch.sh'"]
    return [*words, "--configfile", str(folder / "config.json"), "--", arguments[-1]]


def show(name: str, costs: list[measure.Cost]) -> None:
    """Print a line of medians; other work on the machine affects CPU seconds less than seconds."""
    seconds = median(cost.seconds for cost in costs)
    cpu_seconds = median(cost.cpu_seconds for cost in costs)
    megabytes = median(cost.peak_bytes for cost in costs) / 1e6
    print(f"{name:<36}{seconds:>8.1f} s{cpu_seconds:>8.1f} CPU s{megabytes:>8.0f} MB", flush=True)


def jobs(text: str) -> str:
    """Format Snakemake's table of jobs as one line."""
    table = re.search(r"^job +count\n-+ +-+\n(.*?)^total", text, re.M | re.S)
    rows = re.findall(r"^(\w+) +(\d+)$", table[1], re.M) if table else []
    return "would do: " + ", ".join(f"{count} {rule}" for rule, count in rows)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--files", type=int, default=100_000, help="raw files")
    parser.add_argument("--rounds", type=int, default=3, help="runs per median")
    parser.add_argument("--clean", action="store_true", help="filters and duplicates, dry run only")
    parser.add_argument("--work", type=Path, required=True, help="scratch folder, is replaced")
    return parser.parse_args()


if __name__ == "__main__":
    main()
