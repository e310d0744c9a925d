"""Tiny training runs for tests: random tokens, index, random Llama, run.yaml."""

import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed.checkpoint as dcp

from tests.support import native_weights
from tests.support.programs import torch_python, torchrun
from tests.support.random_tensors import random_tensors
from tokamake import files
from tokamake.checkpoint.native.folder import DESCRIPTION, VERSION, open_native
from tokamake.config.architecture import Architecture
from tokamake.config.resolved_run import read_run
from tokamake.data.indexed.dataset import DatasetWriter
from tokamake.data.indexed.manifest import sizes_and_hashes, write_manifest
from tokamake.data.indexed.paths import bin_path, idx_path, manifest_path
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.index import index
from tokamake.data.samples.steps import batches
from tokamake.runtime.process_group import free_port, process_group
from tokamake.runtime.ranks import Ranks
from tokamake.train.metrics import Record, read
from tokamake.train.resolve import resolve
from tokamake.train.train import start_run

MPICH = Path(sys.prefix) / "mpich"
"""Folder of MPICH, installed for tests only: not on PATH, and not where mpi4py searches."""
MPI = str(MPICH / "lib/libmpi.so.12")
"""Library of MPICH, for mpi4py's variable MPI4PY_LIBMPI."""
DEEPSPEED = ("-m", "deepspeed.launcher.runner")
"""Program of the command `deepspeed`."""

ARCHITECTURE = Architecture(
    vocab_size=120,  # not a multiple of Megatron's padding
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=32,
)
SETTINGS: dict[str, Any] = {
    "sequence_length": 16,
    "micro_batch_size": 2,
    "global_batch_size": 8,
    "train_steps": 6,
    "split": "80,20,0",
    "optimizer": {"learning_rate": 0.01},
    "schedule": {"warmup_steps": 2},
    "gradient_clipping": 0.5,
    "log_interval": 1,
    "evaluation_interval": 3,
    "evaluation_steps": 2,
    "save_interval": 2,
}


def prepare(root: Path, *, train_samples: int = 80) -> Path:
    """Write data, index and initial checkpoint into a folder."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 40, 200)
    # Each token is repeated three times, so that the model can learn to predict it.
    tokens = np.repeat(generator.integers(0, 120, lengths.sum()), 3)[: lengths.sum()]
    with DatasetWriter(root / "corpus.bin", root / "corpus.idx", dtype=np.uint16) as writer:
        writer.add(tokens, lengths.astype(np.int32))
    vouch(root / "corpus", vocab_size=120)
    (root / "weights.txt").write_text("1.0 corpus corpus\n")
    samples = {"train_samples": train_samples, "valid_samples": 16}
    make_index(root, sequence_length=16, split="80,20,0", seed=3, **samples)
    write_start(root / "start", ARCHITECTURE, random_tensors(ARCHITECTURE, 5))
    return root


def write_start(
    folder: Path, architecture: Architecture, weights: Mapping[str, torch.Tensor]
) -> None:
    """Write an initial checkpoint; replace an existing one."""
    shutil.rmtree(folder, ignore_errors=True)
    step_folder = folder / "global_step0"
    step_folder.mkdir(parents=True)
    model = {"architecture": architecture.model_dump(mode="json"), "loss_scale": (1.0, 0)}
    progress = {"version": VERSION, "world_size": 0, "iteration": 0}
    files.write_json(step_folder / DESCRIPTION, progress | model)
    state = {f"model.{name}": tensor for name, tensor in weights.items()}
    with warnings.catch_warnings(action="ignore"):  # it warns of a single process
        dcp.save(state, checkpoint_id=step_folder, no_dist=True)
    (folder / "latest").write_text(step_folder.name)


def vouch(prefix: Path, **known: Any) -> None:
    """Write the manifest of an indexed dataset."""
    paths = bin_path(prefix), idx_path(prefix)
    write_manifest(manifest_path(prefix), {**known, **sizes_and_hashes(*paths)})


def make_index(root: Path, **options: Any) -> None:
    """Index the datasets that `root`/weights.txt names."""
    index(weights=root / "weights.txt", data_root=root, output=root / "index", **options)


def make_run(
    root: Path,
    name: str,
    *,
    tokenizer: Path | None = None,
    start: Path | Literal["random"] | None = None,
    architecture: Path | None = None,
    parent: str | None = None,
    **changes: Any,
) -> Path:
    """Resolve a run in a prepared folder; return its run.yaml."""
    output = root / name / "run.yaml"
    resolve(
        settings=json.dumps({**SETTINGS, **changes}),
        run=name,
        seed=11,
        checkpoint=None if start == "random" else start or root / "start",
        architecture=architecture,
        parent=parent,
        index=root / "index",
        data_root=root,
        tokenizer=tokenizer,
        output_folder=root / name / "training",
        output=output,
    )
    return output


def launch(
    config: Path,
    *,
    ranks: int = 1,
    code: int = 0,
    launcher: str = "torchrun",
    program: tuple[str, ...] = ("-m", "tokamake"),
) -> str:
    """Train in new processes, check the exit code, return the output."""
    start = launch_line(launcher, ranks) if ranks > 1 else [torch_python()]
    mpi = {"MPI4PY_LIBMPI": MPI} if launcher == "mpiexec" else {}  # no other launcher needs MPI
    process = subprocess.run(
        [*start, *program, "train", "--config", str(config)],
        env={**os.environ, **mpi, "OMP_NUM_THREADS": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=900,
        check=False,
    )
    assert process.returncode == code, process.stdout
    return process.stdout


def launch_line(launcher: str, ranks: int) -> list[str]:
    """Command prefix that starts Python, or for deepspeed a Python program, on several ranks."""
    if launcher == "mpiexec":
        return [str(MPICH / "bin/mpiexec"), "-n", str(ranks), sys.executable]
    if launcher == "deepspeed":
        place = ["--master_port", str(free_port()), "--num_gpus", str(ranks)]
        return [torch_python(), *DEEPSPEED, *place]
    return [*torchrun(ranks), torch_python()]


def train_here(config: Path, **options: Any) -> int:
    """Train in this process, with options of `start_run`; return the exit code."""
    ranks = Ranks(0, 1, 0, 1)
    with process_group(ranks) as device:
        return start_run(read_run(config), ranks, device=device, **options)


def losses(config: Path, key: str = "loss") -> list[float]:
    """Training losses of a run, or other values of its records, step by step."""
    return [record[key] for record in records(config) if key in record]


def records(config: Path) -> list[Record]:
    """All records of a run."""
    return read(read_run(config).output / "metrics.jsonl")


def read_weights(path: Path) -> tuple[Architecture, dict[str, torch.Tensor], int]:
    """Read architecture, whole weights by tensor name, and number of steps of a checkpoint."""
    return native_weights.read(open_native(path).path)


def weights(config: Path) -> dict[str, torch.Tensor]:
    """Weights in a run's latest checkpoint, under Hugging Face's names."""
    return read_weights(read_run(config).output)[1]


def summary(config: Path) -> dict[str, Any]:
    """A run's train.json."""
    value: dict[str, Any] = files.read_json(config.with_name("train.json"), "")
    return value


def whole_batches(root: Path, split: str, *, size: int) -> Any:
    """Batches of the samples of a split, in order."""
    samples = DocumentSamples(root / "index", split=split, data_root=root)
    return batches(
        samples,
        consumed_samples=0,
        micro_batch_size=size,
        data_parallel_rank=0,
        data_parallel_size=1,
    )


def hashes(config: Path, step: int = 6) -> dict[str, str]:
    """Hashes of a checkpoint's files: weights, optimizer states, states of ranks."""
    folder = read_run(config).output / f"global_step{step}"
    digests = {path.name: files.sha256(path) for path in folder.glob("*.distcp")}
    assert digests
    return digests


def copy(config: Path, folder: Path) -> Path:
    """Copy a finished run to another folder, where the same command finds its checkpoint."""
    shutil.copytree(config.parent, folder)
    text = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(text.replace(str(config.parent), str(folder)))
    return folder / "run.yaml"


def assert_equal_weights(actual: Path, expected: Path, *, rtol: float, atol: float) -> None:
    """Compare the weights of the last checkpoints of two runs."""
    expected_weights = weights(expected)
    assert weights(actual).keys() == expected_weights.keys()
    for name, tensor in weights(actual).items():
        torch.testing.assert_close(tensor, expected_weights[name], rtol=rtol, atol=atol, msg=name)
