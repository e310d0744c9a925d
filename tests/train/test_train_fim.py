"""Training with documents that are rearranged for fill-in-the-middle."""

import json
import string
from pathlib import Path

import pytest
import tokenizers

from tests.support.forked import train
from tests.support.runs import losses, make_run, prepare
from tokamake.config.resolved_run import read_run
from tokamake.data.samples.document_samples import DocumentSamples
from tokamake.data.samples.fim.samples import FimSamples, training_samples
from tokamake.errors import UserError

FIM = {"rate": 0.9}
SPECIAL = ["<|endoftext|>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prepared run, and a tokenizer of ASCII with as many entries as the model has embeddings."""
    root = prepare(tmp_path_factory.mktemp("fim"))
    make_tokenizer(root / "tokenizer", 116)
    make_tokenizer(root / "larger", 117)
    return root


def make_tokenizer(folder: Path, size: int) -> None:
    from tokenizers import decoders, models, pre_tokenizers

    pairs = [(letter, letter) for letter in string.ascii_lowercase][: size - 97]
    entries = [*map(chr, range(33, 127)), *"ĠĊĉ", *(a + b for a, b in pairs)]
    model = models.BPE({entry: number for number, entry in enumerate(entries)}, pairs)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[0]}))


@pytest.mark.ranks
def test_a_run_trains_on_rearranged_documents(root: Path) -> None:
    fim, short = {"fim": FIM, "tokenizer": root / "tokenizer"}, {"train_steps": 2}
    plain, rearranged = (
        make_run(root, "plain", **short),
        make_run(root, "rearranged", **short, **fim),
    )
    for config in (plain, rearranged):
        train(config)
    # Validation samples are not rearranged: before the first step the loss is the same.
    assert losses(plain, "validation_loss")[0] == losses(rearranged, "validation_loss")[0]
    assert losses(plain)[0] != losses(rearranged)[0]
    assert len(losses(rearranged)) == 2


def test_samples_follow_the_settings_of_the_run(root: Path) -> None:
    assert isinstance(training_samples(read_run(make_run(root, "off"))), DocumentSamples)
    run = read_run(make_run(root, "on", fim=FIM, tokenizer=root / "tokenizer"))
    samples = training_samples(run)
    assert isinstance(samples, FimSamples)
    assert 117 in samples[0]


@pytest.mark.parametrize(
    ("tokenizer", "settings", "message"),
    [
        (None, FIM, "needs a tokenizer; give it with --tokenizer"),
        ("tokenizer", {**FIM, "middle": "<MID>"}, "fim.middle: '<MID>': not a special token"),
        ("larger", FIM, "has 121 entries, the model 120 embeddings"),
        ("tokenizer", {"rate": 2}, "train: fim.rate: "),
    ],
)
def test_an_unfit_run_is_refused_before_training(
    root: Path, tokenizer: str | None, settings: dict[str, object], message: str
) -> None:
    path = root / tokenizer if tokenizer else None
    with pytest.raises(UserError, match=message):
        make_run(root, "misfit", fim=settings, tokenizer=path)
