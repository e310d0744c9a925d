"""Samples of text while a run trains: the model continues the same prompts every few steps.

All ranks run the passes of the model; rank 0 writes samples.jsonl. Each pass takes the way of a
validation, at every layout, and draws have numbers of their own, so that training stays as it is.
Prompts are short, and there are few: each token is a whole pass, without a cache.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from tokamake.config.resolved_run import Run
from tokamake.data.indexed.dataset import IndexedDataset
from tokamake.data.samples.index_folder import read_index
from tokamake.data.samples.loader import PAD, SplitSamples, open_samples
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError
from tokamake.runtime.rank_errors import raise_on_all_ranks
from tokamake.train.hooks import FinishedStep, Hook, Training
from tokamake.train.metrics import RecordFile, TextSample

FILE = "samples.jsonl"
"""File in the output folder of a run: a line for each prompt and step."""
NUM_PROMPTS = 4
"""Prompts from a validation split, divided among its corpora; each corpus has one at least."""
PROMPT_TOKENS = 16
"""Tokens of such a prompt."""
_SEARCHED_SAMPLES = 1000
"""Samples of a split in which beginnings of documents are searched."""


class SampledPrompt(NamedTuple):
    """A text to continue."""

    tokens: list[int]
    text: str
    corpus: str = ""
    """Corpus that it is from; empty if the config states it."""


class SampledPrompts(NamedTuple):
    """The texts to continue, as all ranks have them."""

    prompts: list[SampledPrompt]
    vocab_size: int
    """Tokens of the tokenizer."""
    eod: int
    """Token that ends a text."""


class TextSamples(Hook):
    """Continues prompts after some steps; all ranks call its methods together."""

    def __init__(self, training: Training) -> None:
        self._training, self._train = training, training.run.train
        self._tokenizer: Tokenizer | None = None
        self._file: RecordFile | None = None
        found: list[SampledPrompts | None] = [None]
        with raise_on_all_ranks():
            if training.ranks.rank == 0:
                found[0] = self._open(training.run, done=training.state.step)
        dist.broadcast_object_list(found, src=0)
        (prompts,) = found
        assert prompts
        self._prompts = prompts
        # The same draws at each step: texts differ by what the model has learned.
        shape = len(prompts.prompts), self._train.sample_tokens
        self._chances = np.random.default_rng(training.run.seed).random(shape)

    def _open(self, run: Run, *, done: int) -> SampledPrompts:
        if run.tokenizer is None:
            raise UserError(
                "train.sample_interval: the run has no tokenizer to write text with; give "
                "`resolve` its --tokenizer"
            )
        self._tokenizer = tokenizer = open_tokenizer(run.tokenizer)
        self._file = RecordFile(run.output / FILE, lambda record: 0 < done >= record["step"])
        prompts = [*(stated_prompts if run.train.sample_prompts else split_prompts)(run, tokenizer)]
        if not prompts:
            raise UserError(
                "train.sample_interval: no document of the validation splits is long enough for a "
                "prompt; give train.sample_prompts"
            )
        return SampledPrompts(prompts, tokenizer.vocab_size, tokenizer.eod)

    def end_step(self, finished: FinishedStep) -> None:
        """Continue the prompts, if samples are due."""
        step, interval = finished.state.step, self._train.sample_interval or 1
        if step % interval and step != self._train.train_steps:
            return
        tokens = self._continuations()
        if self._file and self._tokenizer:
            texts = [
                TextSample(prompt.corpus, prompt.text, continued(self._tokenizer, prompt, new))
                for prompt, new in zip(self._prompts.prompts, tokens, strict=True)
            ]
            for text in texts:
                self._file.add({"step": step, **text._asdict()})
            self._training.show_texts(step, texts)

    def _continuations(self) -> list[list[int]]:
        """Tokens that the model adds to each prompt."""
        prompts, parallel = self._prompts.prompts, self._train.parallel
        lengths = [len(prompt.tokens) for prompt in prompts]
        new: list[list[int]] = [[] for _ in prompts]
        # Ranks divide a sequence into equal parts; the length of a training sample always fits.
        multiple = 2 * parallel.context_parallel_size * parallel.tensor_parallel_size
        longest = -(-(max(lengths) + self._train.sample_tokens) // multiple) * multiple
        rows = np.full((len(prompts), min(longest, self._train.sequence_length) + 1), PAD)
        for row, prompt in zip(rows, prompts, strict=True):
            row[: len(prompt.tokens)] = prompt.tokens
        for place in range(self._train.sample_tokens):
            growing = [n for n, tokens in enumerate(new) if not self._has_ended(tokens)]
            growing = [n for n in growing if lengths[n] < rows.shape[1] - 1]
            if not growing:
                break
            chosen = self._training.engine.next_tokens(
                rows,
                lengths=lengths,
                vocab_size=self._prompts.vocab_size,
                temperature=self._train.sample_temperature,
                chances=self._chances[:, place],
            )
            for number in growing:
                rows[number, lengths[number]] = chosen[number]
                new[number].append(chosen[number])
                lengths[number] += 1
        return new

    def _has_ended(self, tokens: Sequence[int]) -> bool:
        return tokens[-1:] == [self._prompts.eod]

    def sync(self) -> None:
        """Bring all samples to disk."""
        with raise_on_all_ranks():
            if self._file:
                self._file.sync()

    def close(self) -> None:
        if self._file:
            self._file.close()


def open_hook(training: Training) -> Hook:
    """Samples of text; nothing if the run has none."""
    return TextSamples(training) if training.run.train.sample_interval else Hook()


def continued(tokenizer: Tokenizer, prompt: SampledPrompt, new: list[int]) -> str:
    """Text of the new tokens: some tokenizers write a token differently at the beginning."""
    new = new[:-1] if new[-1:] == [tokenizer.eod] else new
    whole = tokenizer.decode([*prompt.tokens, *new])
    return whole.removeprefix(tokenizer.decode(prompt.tokens))


def stated_prompts(run: Run, tokenizer: Tokenizer) -> Iterator[SampledPrompt]:
    """The prompts of the config."""
    for number, text in enumerate(run.train.sample_prompts):
        tokens = tokenizer.encode_prompt(text)
        if len(tokens) >= run.train.sequence_length:
            raise UserError(
                f"train.sample_prompts: prompt {number + 1}, {text[:40]!r}: its {len(tokens)} "
                f"tokens fill the sequence_length {run.train.sequence_length}; shorten it"
            )
        yield SampledPrompt(tokens, text)


def split_prompts(run: Run, tokenizer: Tokenizer) -> Iterator[SampledPrompt]:
    """Beginnings of documents of the validation splits, from each corpus."""
    for split in read_index(run.index)["splits"]:
        if split == "train":
            continue
        samples = open_samples(run.index, split=split, data_root=run.data_root, verify=False)
        for tokens, corpus in _beginnings(samples, run):
            yield SampledPrompt(tokens, tokenizer.decode(tokens), corpus)


def _beginnings(samples: SplitSamples, run: Run) -> Iterator[tuple[list[int], str]]:
    """First tokens of documents, and their corpora."""
    size = min(PROMPT_TOKENS, run.train.sequence_length // 2)
    wanted = dict.fromkeys(samples.corpora, max(1, NUM_PROMPTS // len(samples.corpora)))
    for sample in range(min(len(samples), _SEARCHED_SAMPLES)):
        corpus = samples.corpus_of(sample)
        if not wanted[corpus]:
            continue
        for span in samples.spans(sample):
            if span.start == 0 and span.stop > size:
                wanted[corpus] -= 1
                yield _tokens(run.data_root / span.prefix, span.sequence)[:size].tolist(), corpus
                break


def _tokens(prefix: Path, sequence: int) -> npt.NDArray[Any]:
    return IndexedDataset(prefix)[sequence]
