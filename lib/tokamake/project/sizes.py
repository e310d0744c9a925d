"""Model, tokenizer and length of a first training, by the size of the text.

A token is about 4 bytes of text. A model learns from about 20 tokens a parameter (Hoffmann et al.,
arXiv 2203.15556), and up to 4 passes over a text teach nearly as much as new text (Muennighoff et
al., arXiv 2305.16264).
"""

from collections.abc import Sequence
from typing import NamedTuple

from tokamake.config.data import MIN_VOCAB_SIZE
from tokamake.project.corpora import FoundCorpus

_BYTES_PER_TOKEN = 4
_TOKENS_PER_PARAMETER = 20
_MOST_PASSES = 4
_BYTES = 256
_FIRST_TOKENS = 800_000
"""Tokens of a training on this machine: minutes on two cores."""
_FEWEST_DOCUMENTS = 40
"""Documents from which some are held out for validation and test."""


class StartModel(NamedTuple):
    """A model that a project may begin with."""

    file: str
    """Name of its file in config/models."""
    parameters: int
    most_vocab: int
    sequence_length: int
    learning_rate: str
    samples: int
    """Samples of a step, at least."""


MODELS = (
    StartModel("tiny-llama", 4_900_000, 8_192, 256, "2.0e-3", 16),
    StartModel("gpt2-124m", 124_400_000, 50_257, 1024, "6.0e-4", 256),
    StartModel("gpt2-345m", 354_800_000, 50_257, 1024, "3.0e-4", 256),
)
"""From small to large; the first one trains on a laptop in minutes."""


class ProjectSize(NamedTuple):
    """Sizes of a project."""

    model: StartModel
    vocab_size: int
    sequence_length: int
    micro_batch_size: int
    global_batch_size: int
    train_steps: int
    passes: float
    """Passes over the text that the steps are."""
    split: str
    is_first: bool
    """Whether the training is only a first one, of minutes."""

    @property
    def interval(self) -> int:
        """Steps between validations."""
        return max(1, self.train_steps // 10)


def size_of(corpora: Sequence[FoundCorpus], *, num_ranks: int, is_local: bool) -> ProjectSize:
    """Choose sizes for some text and the ranks that train.

    Args:
        is_local: the ranks are processes of this machine.
    """
    text_bytes = sum(corpus.text_bytes for corpus in corpora)
    tokens = max(1, text_bytes // _BYTES_PER_TOKEN)
    possible = [each for each in MODELS[: 1 if is_local else None] if _fits(each, tokens)]
    model = [MODELS[0], *possible][-1]
    length = model.sequence_length if tokens >= 100_000 else 64
    micro_batch = 8
    multiple = micro_batch * num_ranks
    batch = -(-model.samples // multiple) * multiple
    wanted = min(_MOST_PASSES * tokens, model.parameters * _TOKENS_PER_PARAMETER)
    trained = min(wanted, _FIRST_TOKENS) if is_local else wanted
    steps = min(max(20, trained // (batch * length)), 1_000_000)
    return ProjectSize(
        model=model,
        vocab_size=_vocab_size(model, corpora),
        sequence_length=length,
        micro_batch_size=micro_batch,
        global_batch_size=batch,
        train_steps=steps if steps < 100 else steps // 10 * 10,
        passes=steps * batch * length / tokens,
        split=_split(corpora),
        is_first=trained < wanted,
    )


def _vocab_size(model: StartModel, corpora: Sequence[FoundCorpus]) -> int:
    """Entries of the tokenizer: fewer for a small text, and no more than its words can give.

    Each word of several bytes that is seen once gives at least one entry beside the bytes.
    """
    number = _power_of_two(sum(corpus.text_bytes for corpus in corpora) // 500)
    if number <= model.most_vocab:
        texts = (text for corpus in corpora for text in corpus.first_texts)
        words = {word for text in texts for word in text.split() if len(word) > 1}
        number = min(number, _BYTES + len(words))
    return min(max(MIN_VOCAB_SIZE, number), model.most_vocab)


def _fits(model: StartModel, tokens: int) -> bool:
    return tokens * _MOST_PASSES >= model.parameters * _TOKENS_PER_PARAMETER


def _power_of_two(number: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << max(0, number.bit_length() - 1)


def _split(corpora: Sequence[FoundCorpus]) -> str:
    counts = [corpus.num_documents for corpus in corpora]
    numbers = [number for number in counts if number is not None]
    is_small = len(numbers) == len(counts) and min(numbers) < _FEWEST_DOCUMENTS
    return "100,0,0" if is_small else "90,5,5"
