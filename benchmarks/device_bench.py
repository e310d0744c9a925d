"""Sizes, data and processes of the cases of `device.py`."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
DOCUMENT_TOKENS = 512
EOD = 0
"""Token that ends each document."""
Settings = dict[str, Any]


class Sizes(NamedTuple):
    """Sizes of the measured runs."""

    shape: Settings
    length: int
    """Tokens of a sample."""
    samples: int
    """Samples of a step."""
    micro_batches: tuple[int, ...]
    """Samples of a micro batch; the first one that fits the device's memory is used."""
    steps: int
    warmup_steps: int
    small: Settings
    """Shape of the runs that are compared bit by bit and with other processes."""


SMALL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
LARGE = Sizes(
    shape={
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    length=4096,
    samples=16,
    micro_batches=(4, 2, 1),
    steps=8,
    warmup_steps=3,
    small=SMALL,
)
TINY = Sizes(
    shape={**SMALL, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
    length=1024,
    samples=2,
    micro_batches=(1,),
    steps=1,
    warmup_steps=1,
    small={**SMALL, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
)
"""Sizes with which a CPU runs all cases in a minute or two."""


class Failure(Exception):
    """A case that did not give what it should."""


class LeftOut(Exception):
    """A case that cannot run here; the message says why."""


class Bench(NamedTuple):
    """What cases need to know."""

    work: Path
    device: Settings
    """`kind`, `name`, `count`, `memory_bytes` (None on a CPU) and the version of torch."""
    sizes: Sizes
    deadline: float
    """Time of the clock `time.monotonic` at which the last process ends."""

    @property
    def kind(self) -> str:
        kind: str = self.device["kind"]
        return kind

    def call(self, *arguments: str, log: str) -> str:
        """Run a module or file of Python; return its output, which is also in DIR/<log>.log.

        Raises:
            LeftOut: the time is over.
            Failure: the exit status is not 0.
        """
        path = self.work / f"{log}.log"
        with path.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=ROOT,
                env={**os.environ, **_environment(self.kind)},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            status = process.wait(max(1.0, self.deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise LeftOut(f"the time was over; see {log}.log") from None
        finally:
            if process.poll() is None:  # its workers hold the device, too
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        text = path.read_text(errors="replace")
        if status:
            raise Failure(
                f"exit status {status}: {text.strip().rpartition(chr(10))[2]}; see {log}.log"
            )
        return text

    def run(self, name: str, shape: Settings, **train: Any) -> Path:
        """Write DIR/<name>/run.yaml, a run from random weights on the data of `prepare`."""
        from tokamake.config.architecture import Architecture
        from tokamake.config.resolved_run import Run, write_run

        length, folder = self.sizes.length, self.work / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        run = Run(
            run=name,
            seed=1,
            index=self.work / "index",
            data_root=self.work,
            eod=EOD,
            output=folder / "training",
            architecture=Architecture.model_validate(
                {"family": "llama", "max_position_embeddings": length, **shape}
            ),
            train={
                "sequence_length": length,
                "global_batch_size": self.sizes.samples,
                "micro_batch_size": self.sizes.micro_batches[-1],
                "train_steps": num_steps(self.sizes),
                "split": "100,0,0",
                "precision": "bf16",
                **train,
            },
        )
        write_run(folder / "run.yaml", run)
        return folder / "run.yaml"


def num_steps(sizes: Sizes) -> int:
    """Steps for which there are data: of `benchmark-train`, and of the runs that continue."""
    return max(6, sizes.warmup_steps + sizes.steps + max(1, sizes.steps // 4))


def _environment(kind: str) -> dict[str, str]:
    if kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return {}


def prepare(work: Path, sizes: Sizes) -> None:
    """Write an indexed dataset of random documents, and its index."""
    import numpy as np

    from tokamake.data.indexed.dataset import DatasetWriter
    from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
    from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
    from tokamake.data.samples.index import index

    vocab_size = min(sizes.shape["vocab_size"], sizes.small["vocab_size"])
    samples = num_steps(sizes) * sizes.samples
    documents = -(-samples * (sizes.length + 1) // DOCUMENT_TOKENS) + 8
    tokens = np.random.default_rng(0).integers(1, vocab_size, (documents, DOCUMENT_TOKENS))
    tokens[:, -1] = EOD
    paths = bin_path(work / "corpus"), idx_path(work / "corpus")
    with DatasetWriter(*paths, dtype=np.uint16) as writer:
        writer.add(tokens.flatten(), np.full(documents, DOCUMENT_TOKENS, np.int32))
    about = {"vocab_size": vocab_size, **sizes_and_hashes(*paths)}
    write_manifest(manifest_path(work / "corpus"), about)
    (work / "weights.txt").write_text("1.0 corpus corpus\n")
    index(
        weights=work / "weights.txt",
        data_root=work,
        output=work / "index",
        sequence_length=sizes.length,
        split="100,0,0",
        seed=1,
        train_samples=samples,
        valid_samples=0,
    )
