"""Settings and special tokens of fill-in-the-middle, and unsuitable tokenizers."""

import json
from pathlib import Path

import pytest

from tests.support.fim_samples import (
    NAMES,
    SEPARATOR,
    SLACK,
    SUFFIX,
    FixedSamples,
    rearranged,
)
from tokamake.config.train_sections import FimSettings
from tokamake.config_files import validate
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.samples.fim.samples import FimSamples
from tokamake.errors import UserError


def test_digest_covers_everything_that_decides_samples(folder: Path, tmp_path: Path) -> None:
    samples = FixedSamples([[7, 8]])
    digests = {rearranged(folder, samples).digest, rearranged(folder, samples).digest}
    assert len(digests) == 1
    for change in ({"rate": 0.1}, {"spm_rate": 0}, {"prefix": "<file_sep>"}, {"seed": 12}):
        digests.add(rearranged(folder, samples, **change).digest)
    samples.digest = "other"
    digests.add(rearranged(folder, samples).digest)
    samples.digest = "fixed"
    renamed = tmp_path / "tokenizer"
    renamed.mkdir()
    for path in (folder / "tokenizer").iterdir():
        (renamed / path.name).write_text(path.read_text() + "\n")
    digests.add(FimSamples(samples, FimSettings(), tokenizer=renamed, seed=11).digest)
    assert len(digests) == 7


def test_added_tokens_need_not_be_special(folder: Path, tmp_path: Path) -> None:
    """Qwen's are not. GPT-NeoX adds repeated spaces, which are text."""
    definition = json.loads((folder / "tokenizer/tokenizer.json").read_text())
    for token in definition["added_tokens"][1:]:
        token["special"] = False
    spaces = {"id": 600, "content": " " * 9, "single_word": False, "lstrip": False}
    flags = {"rstrip": False, "normalized": False, "special": False}
    definition["added_tokens"].append(spaces | flags)
    changed = tmp_path / "tokenizer"
    changed.mkdir()
    (changed / "tokenizer.json").write_text(json.dumps(definition))
    config = "tokenizer_config.json"
    (changed / config).write_text((folder / "tokenizer" / config).read_text())
    spaces_alone = [[600, SEPARATOR, *SLACK[:40]]]
    suffix_positions = set()
    for seed in range(60):
        samples = FimSamples(
            FixedSamples(spaces_alone),
            FimSettings(rate=1, spm_rate=0),
            tokenizer=changed,
            seed=seed,
        )  # type: ignore[arg-type]
        row = samples[0].tolist()
        assert row.count(SEPARATOR) == 1
        suffix_positions.add(row.index(SUFFIX))
    assert len(suffix_positions) > 2  # cuts fall between the spaces


@pytest.mark.parametrize("name", ["rate", "spm_rate", "fragment_rate"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_rates_out_of_range_are_refused(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"train\.fim: {name}: "):
        validate(FimSettings, {name: value}, "train.fim")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": "<PRE>"}, r"fim\.prefix: '<PRE>': not .* it has <fim_prefix>, <fim_suffix>"),
        ({"middle": "return"}, r"fim\.middle: 'return': not .*--special-tokens '<fim_prefix>'"),
        ({"split_token": "<x>"}, r"fim\.split_token: '<x>': not .*--special-tokens '<x>'"),
        ({"suffix": "<fim_prefix>"}, r"^train\.fim\.suffix: the same token as train\.fim\.prefix"),
        ({"middle": "<|endoftext|>"}, r"fim\.middle: the same token as the end of a document"),
    ],
)
def test_wrong_special_tokens_are_refused(
    folder: Path, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rearranged(folder, FixedSamples([[1]]), **settings)


def test_unsuitable_tokenizers_are_refused(sampled: Path, folder: Path, tmp_path: Path) -> None:
    raw = sorted((sampled / "raw").rglob("*.*"))
    with pytest.raises(UserError, match="it has no similar ones: use them, or train"):
        FimSamples(FixedSamples([[1]]), FimSettings(), tokenizer=sampled / "tokenizer", seed=0)  # type: ignore[arg-type]
    for kind in ("wordpiece", "unigram"):
        train_tokenizer(
            raw, kind=kind, vocab_size=600, special_tokens=NAMES, output=tmp_path / kind
        )
    FimSamples(FixedSamples([[1]]), FimSettings(), tokenizer=tmp_path / "unigram", seed=0)  # type: ignore[arg-type]
    spaced = tmp_path / "spaced"
    spaced.mkdir()
    for path in (folder / "tokenizer").iterdir():
        text = path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true')
        (spaced / path.name).write_text(text)
    for path in (tmp_path / "wordpiece", spaced):
        with pytest.raises(
            UserError, match=f"{path}: .*this tokenizer changes text cut into.*byte-level"
        ):
            FimSamples(FixedSamples([[1]]), FimSettings(), tokenizer=path, seed=0)  # type: ignore[arg-type]


def test_datasets_of_another_tokenizer_are_refused(folder: Path, tmp_path: Path) -> None:
    samples = FixedSamples([[1, 600]])
    with pytest.raises(UserError, match="token 600 in a sample, the tokenizer has 600 entries"):
        rearranged(folder, samples)[0]
    samples.prefixes = [tmp_path / "code"]
    (tmp_path / "code.json").write_text('{"tokenizer": "another"}')
    with pytest.raises(UserError, match="code: made with another tokenizer"):
        rearranged(folder, samples)
    FimSamples(samples, FimSettings(), tokenizer=folder / "tokenizer", seed=0, verify=False)  # type: ignore[arg-type]
