"""Data folders: paths of the tokenizer, datasets and report that runs share.

Paths are relative to the working directory of the workflow. This module imports nothing, because
`status` and the workflow share it.
"""

from typing import NamedTuple

DEFAULT = "default"
"""Value of `data_set` in a config without it."""
RESERVED_NAMES = (
    *("shards", "merged", "batches", "hashes", "duplicates", "metadata"),
    *("near_duplicates", "repeats", "detoxify", "bm25", "chunks"),
    *("extended_tokenizer", "metadata.json", "plan.json", "data_set.json"),
)
"""Files and folders in results/data: no `data_set` has such a name."""
_RESULTS = "results"
_DATA = f"{_RESULTS}/data"
RUN = f"{_RESULTS}/{{run}}"
"""Folder of a run."""


class DataSet(NamedTuple):
    """Paths that `data_set` decides: the default is results/data, any other name a folder in it."""

    name: str = DEFAULT

    @property
    def folder(self) -> str:
        """Folder of the plan, shards, merged datasets and weighting files."""
        return _DATA if self.name == DEFAULT else f"{_DATA}/{self.name}"

    @property
    def shared(self) -> str:
        """Folder of the tokenizer and the report."""
        return _RESULTS if self.name == DEFAULT else self.folder

    @property
    def logs(self) -> str:
        return "logs" if self.name == DEFAULT else f"logs/data/{self.name}"

    @property
    def benchmarks(self) -> str:
        folder = f"{_RESULTS}/benchmarks"
        return folder if self.name == DEFAULT else f"{folder}/data/{self.name}"

    @property
    def tokenizer(self) -> str:
        """Folder of the tokenizer that the workflow trains."""
        return f"{self.shared}/tokenizer"

    @property
    def extended_tokenizer(self) -> str:
        """Folder of that tokenizer, or of an existing one, with sentinels."""
        return f"{self.shared}/extended_tokenizer"

    @property
    def plan(self) -> str:
        return f"{self.folder}/plan.json"

    @property
    def settings(self) -> str:
        """Settings that the data were made with."""
        return f"{self.folder}/data_set.json"

    @property
    def detoxify(self) -> str:
        """Folder of texts that the runs' initial model writes."""
        return f"{self.folder}/detoxify"

    @property
    def kept_texts(self) -> str:
        """Raw file of the least toxic of these texts."""
        return f"{self.detoxify}/kept.jsonl"

    @property
    def bm25(self) -> str:
        """Folder of the searches by words, which no run decides."""
        return f"{self.folder}/bm25"

    @property
    def chunks(self) -> str:
        """Folder of chunks of documents and their vectors, which objective retro searches."""
        return f"{self.folder}/chunks"

    @property
    def metadata(self) -> str:
        """Metadata of all merged datasets."""
        return f"{self.folder}/metadata.json"

    @property
    def weights(self) -> str:
        """Weighting file of the training split of a `{run}`."""
        return f"{self.folder}/{{run}}.weights.txt"

    def batch_file(self, stage: str, batch: str) -> str:
        """File that `tokenize` or `merge` writes when all datasets of a job batch are complete."""
        return f"{self.folder}/batches/{stage}/{batch}.json"


def data_set_in(folder: str) -> DataSet | None:
    """Return the paths of a data folder; None: the folder is outside results/data."""
    above, _, name = folder.rstrip("/").rpartition("/")
    if folder.rstrip("/") == _DATA:
        return DataSet()
    return DataSet(name) if above == _DATA else None
