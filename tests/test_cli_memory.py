"""Stages with too little memory: one line, nothing half-written, and the same bytes afterwards."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.support.faults import Inject
from tests.support.forked import contents, limited, run_stage, train
from tests.support.interrupted_runs import assert_same_end
from tests.support.runs import make_run, prepare
from tokamake.data.indexed.manifest import find_fault
from tokamake.train.checkpoints.saving import CheckpointSaver

LINE_BYTES = 48 << 20


def tokenized(prefix: Path) -> dict[str, bytes]:
    """Files of a dataset, without its manifest, which has times."""
    return {name: data for name, data in contents(prefix.parent).items() if ".json" not in name}


@pytest.mark.fault("little memory")
@pytest.mark.parametrize(
    ("megabytes", "line_bytes"),
    [
        (64, LINE_BYTES),
        *(pytest.param(size, 20_000, marks=pytest.mark.grid) for size in (1, 4, 16, 32, 64, 128)),
    ],
)
def test_tokenize_with_little_memory_leaves_nothing_half_written(
    workspace: Path, megabytes: int, line_bytes: int, inject: Inject
) -> None:
    raw, log = workspace / "long.jsonl", workspace / "log"
    lines = [json.dumps({"text": "ab " * (line_bytes // 3)}), *['{"text": "some words"}'] * 2000]
    raw.write_text("\n".join(lines) + "\n")

    def arguments(name: str) -> list[str]:
        output = f"--output={workspace / name / 'pair'}"
        return ["tokenize", str(raw), output, f"--tokenizer={workspace / 'tokenizer'}"]

    inject()
    fault = partial(limited, megabytes)
    code = run_stage([*arguments("out"), "--workers=1"], log, fault=fault)
    printed = log.read_text()
    assert "Traceback" not in printed
    if line_bytes == LINE_BYTES:
        assert code == 1
        assert printed.startswith("tokamake tokenize: out of memory: ")
        assert "; give it more memory" in printed
    if code:
        assert find_fault(workspace / "out/pair")
    small = [{"text": "ab " * 5000}, *[{"text": "some words"}] * 2000]
    raw.write_text("".join(json.dumps(document) + "\n" for document in small))
    for name in ("calm", "out"):
        assert run_stage(arguments(name), log) == 0, log.read_text()
    assert tokenized(workspace / "out/pair") == tokenized(workspace / "calm/pair")


def short_of_memory(after_step: int) -> None:
    """Let the first backward pass after a checkpoint want more memory than there is."""
    finish, backward = CheckpointSaver.finish, torch.autograd.backward
    is_saved = False

    def finish_saving(saver: CheckpointSaver) -> None:
        nonlocal is_saved
        finish(saver)
        is_saved = is_saved or saver.latest.endswith(f"global_step{after_step}")

    def backward_or_fail(*arguments: object, **options: object) -> None:
        if is_saved:
            limited(64)
            torch.empty(1 << 30)
        backward(*arguments, **options)

    CheckpointSaver.finish = finish_saving
    torch.autograd.backward = backward_or_fail


@pytest.mark.fault("little memory")
def test_a_step_with_little_memory_ends_in_one_line_and_goes_on(tmp_path: Path) -> None:
    root = prepare(tmp_path)
    expected, config = make_run(root, "whole"), make_run(root, "short")
    train(expected)
    printed = train(config, fault=partial(short_of_memory, 2), code=1)
    assert "Traceback" not in printed
    assert "tokamake train: out of memory: " in printed
    assert "can't allocate memory: you tried to allocate 4294967296 bytes" in printed
    assert not (config.parent / "training/global_step4").exists()
    train(config)
    assert_same_end(config, expected)
