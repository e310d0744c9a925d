"""Settings and special tokens of fill-in-the-middle, and tokenizers that do not serve."""

import json
from pathlib import Path

import pytest

from tests.support.fim_samples import NAMES, SEPARATOR, SLACK, SUFFIX, Given, prepare, rearranged
from tokamake.data.corpus.train_tokenizer import train_tokenizer
from tokamake.data.samples.fim.samples import FimSamples
from tokamake.data.samples.fim.tokens import Fim
from tokamake.errors import UserError


@pytest.fixture(scope="module")
def folder(sampled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with the special tokens, a pair of it and an index."""
    return prepare(tmp_path_factory.mktemp("fim"), sorted((sampled / "raw").rglob("*.*")))


def test_digest_covers_all_that_matters(folder: Path, tmp_path: Path) -> None:
    samples = Given([[7, 8]])
    made = {rearranged(folder, samples).digest, rearranged(folder, samples).digest}
    assert len(made) == 1
    for changed in ({"rate": 0.1}, {"spm_rate": 0}, {"prefix": "<file_sep>"}, {"seed": 12}):
        made.add(rearranged(folder, samples, **changed).digest)
    samples.digest = "other"
    made.add(rearranged(folder, samples).digest)
    samples.digest = "given"
    renamed = tmp_path / "tokenizer"
    renamed.mkdir()
    for path in (folder / "tokenizer").iterdir():
        (renamed / path.name).write_text(path.read_text() + "\n")
    made.add(FimSamples(samples, Fim(), tokenizer=renamed, seed=11).digest)
    assert len(made) == 7


def test_added_tokens_need_not_be_special(folder: Path, tmp_path: Path) -> None:
    """Qwen's are not; GPT-NeoX adds runs of spaces, which are text."""
    described = json.loads((folder / "tokenizer/tokenizer.json").read_text())
    for token in described["added_tokens"][1:]:
        token["special"] = False
    spaces = {"id": 600, "content": " " * 9, "single_word": False, "lstrip": False}
    flags = {"rstrip": False, "normalized": False, "special": False}
    described["added_tokens"].append(spaces | flags)
    made = tmp_path / "tokenizer"
    made.mkdir()
    (made / "tokenizer.json").write_text(json.dumps(described))
    config = "tokenizer_config.json"
    (made / config).write_text((folder / "tokenizer" / config).read_text())
    spaces_alone = [[600, SEPARATOR, *SLACK[:40]]]
    seen = set()
    for seed in range(60):
        found = FimSamples(Given(spaces_alone), Fim(rate=1, spm_rate=0), tokenizer=made, seed=seed)  # type: ignore[arg-type]
        row = found[0].tolist()
        assert row.count(SEPARATOR) == 1
        seen.add(row.index(SUFFIX))
    assert len(seen) > 2  # cuts fall between the spaces


@pytest.mark.parametrize("name", ["rate", "spm_rate", "fragment_rate"])
@pytest.mark.parametrize("value", [-0.1, 1.1, float("nan")])
def test_rates_out_of_range(name: str, value: float) -> None:
    with pytest.raises(UserError, match=rf"fim\.{name}: .*: give 0 to 1"):
        Fim(**{name: value})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"prefix": "<PRE>"}, r"fim\.prefix: '<PRE>': not .* it has <fim_prefix>, <fim_suffix>"),
        ({"middle": "return"}, r"fim\.middle: 'return': not .*--special-tokens '<fim_prefix>'"),
        ({"split_token": "<x>"}, r"fim\.split_token: '<x>': not .*--special-tokens '<x>'"),
        ({"suffix": "<fim_prefix>"}, r"fim\.suffix: the same token as fim\.prefix"),
        ({"middle": "<|endoftext|>"}, r"fim\.middle: the same token as the end of a document"),
    ],
)
def test_special_tokens_that_do_not_serve(
    folder: Path, settings: dict[str, str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        rearranged(folder, Given([[1]]), **settings)


def test_tokenizers_that_do_not_serve(sampled: Path, folder: Path, tmp_path: Path) -> None:
    raw = sorted((sampled / "raw").rglob("*.*"))
    with pytest.raises(UserError, match="it has none like it: name those, or train"):
        FimSamples(Given([[1]]), Fim(), tokenizer=sampled / "tokenizer", seed=0)  # type: ignore[arg-type]
    for kind in ("wordpiece", "unigram"):
        train_tokenizer(
            raw, kind=kind, vocab_size=600, special_tokens=NAMES, output=tmp_path / kind
        )
    FimSamples(Given([[1]]), Fim(), tokenizer=tmp_path / "unigram", seed=0)  # type: ignore[arg-type]
    spaced = tmp_path / "spaced"
    spaced.mkdir()
    for path in (folder / "tokenizer").iterdir():
        text = path.read_text().replace('"add_prefix_space": false', '"add_prefix_space": true')
        (spaced / path.name).write_text(text)
    for path in (tmp_path / "wordpiece", spaced):
        with pytest.raises(UserError, match=f"{path}: changes text that is cut.*over bytes"):
            FimSamples(Given([[1]]), Fim(), tokenizer=path, seed=0)  # type: ignore[arg-type]


def test_pairs_of_another_tokenizer(folder: Path, tmp_path: Path) -> None:
    samples = Given([[1, 600]])
    with pytest.raises(UserError, match="token 600 in a sample, the tokenizer has 600 entries"):
        rearranged(folder, samples)[0]
    samples.pairs = [tmp_path / "code"]
    (tmp_path / "code.json").write_text('{"tokenizer": "another"}')
    with pytest.raises(UserError, match="code: made with another tokenizer"):
        rearranged(folder, samples)
    FimSamples(samples, Fim(), tokenizer=folder / "tokenizer", seed=0, verify=False)  # type: ignore[arg-type]
