"""Stages after training that are killed at random instants: whole or absent, then the same bytes.

Training, `tokenize` and file operations of conversions have tests of their own.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import finetunes, hf_folder, retrieval_stages
from tests.support.families import FAMILIES
from tests.support.faults import Inject
from tests.support.finished_run import make_inputs, make_results
from tests.support.forked import contents, run_stage, timed
from tests.support.llamas import write_confident
from tests.support.random_tensors import random_tensors
from tokamake import files
from tokamake.checkpoint.latest import latest
from tokamake.data.corpus.document_rows import HASH, RowsWriter
from tokamake.data.corpus.passages import PASSAGE

NUM_KILLS = 8
"""Kills of each stage."""


def export(root: Path) -> Callable[[str], list[str]]:
    """Arguments of `convert` to Hugging Face's format, by the name of the target."""
    shape = FAMILIES["llama"].model_copy(update={"num_hidden_layers": 1})
    hf_folder.write(root / "hf", shape, random_tensors(shape, 5))
    paths = [f"--from={root / 'hf'}", "--format=mds", f"--to={root / 'mds'}"]
    assert run_stage(["convert", *paths], root / "log") == 0, (root / "log").read_text()
    options = [f"--from={root / 'mds'}", "--format=hf", "--workers=2"]
    return lambda name: ["convert", *options, f"--to={root / name}"]


def report(root: Path) -> Callable[[str], list[str]]:
    results = make_results(root / "results")
    return lambda name: ["report", str(results), f"--output={root / name}"]


def card(root: Path) -> Callable[[str], list[str]]:
    names = ("config", "train", "metadata", "index")
    options = [f"--{name}={path}" for name, path in make_inputs(root).items() if name in names]
    return lambda name: ["model-card", *options, f"--output={root / name}"]


def repeats(root: Path) -> Callable[[str], list[str]]:
    rows = np.zeros(200_000, PASSAGE)
    rows["hash"] = np.random.default_rng(3).integers(0, 1 << 17, len(rows)) << 46
    rows["document"], rows["end"] = np.arange(len(rows)), 1
    with RowsWriter(root / "rows") as writer:
        writer.add("a/0", rows)
    return lambda name: ["find-repeats", str(root / "rows"), f"--output={root / name}"]


def duplicates(root: Path) -> Callable[[str], list[str]]:
    hashes = np.random.default_rng(3).integers(0, 1 << 62, (300_000, 2), dtype=HASH)
    hashes[1::3] = hashes[::3]
    with RowsWriter(root / "rows") as writer:
        writer.add("a/0", hashes)
    return lambda name: ["find-duplicates", str(root / "rows"), f"--output={root / name}"]


def generated(root: Path) -> Callable[[str], list[str]]:
    write_confident(root / "model", vocab_size=400, context=24)
    tokenizer = ["--kind=ids", "--vocab-size=400", f"--output={root / 'tokenizer'}"]
    assert run_stage(["train-tokenizer", *tokenizer], root / "log") == 0
    model = [f"--checkpoint={root / 'model'}", f"--tokenizer={root / 'tokenizer'}"]
    options = ["--num-texts=40", "--max-new-tokens=12", "--batch-size=8"]
    return lambda name: ["generate-texts", *model, *options, f"--output={root / name}"]


def write_scored(path: Path) -> None:
    """Texts of random numbers as words, with random scores."""
    numbers = random.Random(7)
    words = (" ".join(f"{numbers.randrange(400)}" for _ in range(40)) for _ in range(8_000))
    prompt = {"prompt_number": 0, "prompt_toxicity": 0.1}
    lines = ({"text": text, "toxicity": numbers.random(), **prompt} for text in words)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def scored(root: Path) -> Callable[[str], list[str]]:
    write_scored(root / "texts")
    (root / "words").write_text("\n".join(f"{number} {number + 1}" for number in range(0, 400, 40)))
    options = [str(root / "texts"), f"--scorer=word_list: {root / 'words'}"]
    return lambda name: ["score-texts", *options, f"--output={root / name}"]


def measured(root: Path) -> Callable[[str], list[str]]:
    for name in ("before", "after"):
        write_scored(root / name)
    options = [f"--{name}={root / name}" for name in ("before", "after")]
    return lambda name: ["measure-toxicity", *options, f"--output={root / name}"]


def selected(root: Path) -> Callable[[str], list[str]]:
    write_scored(root / "texts")

    def arguments(name: str) -> list[str]:
        (root / name).mkdir(exist_ok=True)
        outputs = [f"--output={root / name / 'kept'}", f"--summary={root / name / 'summary'}"]
        return ["select-texts", str(root / "texts"), *outputs]

    return arguments


TEXTS = {
    "generate_texts": generated,
    "score_texts": scored,
    "select_texts": selected,
    "measure_toxicity": measured,
}
RETRIEVAL = {
    "embed_passages": retrieval_stages.embeds,
    "embed_questions": retrieval_stages.embeds_questions,
    "embed_blocks": retrieval_stages.embeds_blocks,
    "index_blocks": retrieval_stages.indexes,
    "search_bm25": retrieval_stages.searches_words,
    "search": retrieval_stages.searches,
    "evaluate_retrieval": retrieval_stages.evaluates,
}
STAGES = {
    **{"export": export, "report": report, "model card": card},
    **{"repeats": repeats, "find_duplicates": duplicates},
    **TEXTS,
    **RETRIEVAL,
}

NEEDS = {
    "index_blocks": [pytest.mark.extra("retrieval", "faiss")],
    "search": [pytest.mark.extra("retrieval", "faiss")],
    "search_bm25": [pytest.mark.extra("retrieval", "bm25s")],
}
"""Markers of stages that need packages of an extra."""


def is_whole(made: dict[str, bytes], expected: dict[str, bytes]) -> bool:
    """Whether a killed stage left whole outputs; some share a folder, or come with a manifest."""
    if not expected.keys() & {"kept", retrieval_stages.PRODUCT}:
        return made in ({}, expected)
    visible = {name: made[name] for name in made if name[0] != "."}
    has_manifest = retrieval_stages.PRODUCT in visible
    return visible.items() <= expected.items() and (not has_manifest or visible == expected)


def survives(
    arguments: Callable[[str], list[str]], root: Path, *, num_kills: int, inject: Inject
) -> None:
    timed(arguments("first"), root / "log")  # the server of the forks starts
    seconds = timed(arguments("calm"), root / "log")
    expected, chance, killed = contents(root / "calm"), random.Random(53), 0
    assert expected
    for number in range(8 * num_kills):
        instant = chance.uniform(0, seconds)
        code = run_stage(arguments(f"{number}"), root / "log", seconds=instant)
        assert code in (0, -9), (root / "log").read_text()
        made = contents(root / f"{number}")
        assert is_whole(made, expected)
        if code:
            inject()
            killed += 1
            again = [] if made == expected else arguments(f"{number}")
            assert not again or run_stage(again, root / "log") == 0, (root / "log").read_text()
            left = [path.name for path in root.iterdir() if path.name.startswith(f".{number}.")]
            assert not again or all(name.endswith(".lock") for name in left), left
        assert contents(root / f"{number}") == expected
        if killed == num_kills:
            return
    raise AssertionError(f"{killed} kills")


@pytest.mark.fault("kill of a stage")
@pytest.mark.parametrize(
    ("stage", "num_kills"),
    [
        *(("model card", 2), ("repeats", 2)),
        *(
            pytest.param(
                stage,
                4 if stage in {*TEXTS, *RETRIEVAL} else NUM_KILLS,
                marks=[pytest.mark.grid, *NEEDS.get(stage, [])],
            )
            for stage in STAGES
        ),
    ],
)
def test_a_killed_stage_is_whole_or_absent(
    stage: str, num_kills: int, tmp_path: Path, inject: Inject
) -> None:
    survives(STAGES[stage](tmp_path), tmp_path, num_kills=num_kills, inject=inject)


def finetuned(folder: Path) -> dict[str, Any]:
    """What a finished run decides: scores, and the bytes of its tensors."""
    checkpoint = latest(folder / "finetuned")
    tensors = {path.name: files.sha256(path) for path in checkpoint.glob("*.distcp")}
    result = files.read_json(folder / "finetune.json", "")
    return {"tensors": tensors, **{key: result[key] for key in ("epochs", "best", "digest")}}


@pytest.mark.grid
@pytest.mark.fault("kill of a stage")
def test_a_killed_finetuning_ends_as_one_without_kills(tmp_path: Path, inject: Inject) -> None:
    settings = {"dropout": {"hidden": 0.1}, "save_interval": 2}

    def arguments(name: str) -> list[str]:
        folder = finetunes.prepare(tmp_path, name, rows=(17, 8), **settings).output.parent
        outputs = [f"--output={folder / 'finetune.json'}", f"--model={folder / 'finetuned'}"]
        return ["finetune", f"--config={folder / 'run.yaml'}", *outputs]

    log, chance, killed, number = tmp_path / "log", random.Random(53), 0, 0
    timed(arguments("first"), log)
    seconds = timed(arguments("calm"), log)
    expected = finetuned(tmp_path / "calm")
    while killed < NUM_KILLS:
        number += 1
        halted, code = arguments(f"{number}"), -9
        while code:  # each run is killed until it ends
            instant = chance.uniform(0, seconds) if killed < NUM_KILLS else 600
            code = run_stage(halted, log, seconds=instant)
            assert code in (0, -9), log.read_text()
            if code:
                inject()
                killed += 1
        assert finetuned(tmp_path / f"{number}") == expected
