"""Stage `generate`: continue prompts with a model."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from tokamake.errors import UserError
from tokamake.generate.continuations import Ends, Request, continuing
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout
from tokamake.inference.sampling_settings import BeamSettings, Sampling
from tokamake.retrieval.chunk_retriever import NO_NEIGHBORS, NeighborOptions

_DEFAULT = Sampling()
_ENDS, _NO_BEAMS = Ends(), BeamSettings()


def generate(
    *,
    checkpoint: Path,
    tokenizer: Path | None = None,
    prompts: Annotated[tuple[str, ...], Parameter(alias="--prompt")],
    chat: Annotated[bool, Parameter(negative="")] = False,
    ends: Ends = _ENDS,
    sampling: Sampling = _DEFAULT,
    beams: BeamSettings = _NO_BEAMS,
    batch_size: int = 8,
    stream: Annotated[bool, Parameter(negative="")] = False,
    logprobs: Annotated[bool, Parameter(negative="")] = False,
    layout: InferenceLayout = WHOLE_MODEL,
    data_root: Path = Path(),
    neighbors: NeighborOptions = NO_NEIGHBORS,
    output: Path | None = None,
) -> None:
    """Continue prompts with a model.

    A sample depends on the model, its prompt, the seed and the settings, but not on other prompts.
    A repeated prompt gets a different sample. An empty prompt begins a new document. Prompts begin
    with BOS where transformers adds it, as for Llama's tokenizers.

    A model that is too large for one device is shared by several ranks, as for `evaluate`.

    Args:
        checkpoint: folder of a checkpoint of any format, or of a run, whose newest one counts.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        prompts: texts to continue; repeat the option for each.
        chat: whether prompts are messages of a user, in the chat template of the tokenizer.
        ends: limits that end a continuation.
        sampling: how the next token is chosen.
        beams: settings of beam search.
        batch_size: prompts that are continued at the same time.
        stream: whether to print text as it comes, one prompt after the other.
        logprobs: whether the output has each token and its log-probability.
        layout: how ranks share the model.
        data_root: folder that the datasets of neighbors are relative to.
        neighbors: where a model of family retro finds neighbors of each chunk of the text.
        output: JSON file: a list of prompt, text, num_new_tokens and stopped (eod, stop,
            max_new_tokens, or context: the context of the model is full). Beams have
            the score of the whole beam, also if its text ends at a stop.
    """
    from tokamake.files import write_json

    _check(prompts, ends, beams=beams, batch_size=batch_size, sampling=sampling)
    for name, is_asked in (("stream", stream), ("logprobs", logprobs)):
        if beams.num_beams > 1 and is_asked:
            raise UserError(f"num_beams: {beams.num_beams}: with {name}; leave out one of them")
    request = Request(prompts, ends, sampling, chat, logprobs, data_root, neighbors)
    with continuing(checkpoint, tokenizer, request=request, layout=layout) as model:
        if model is None:
            return
        if beams.num_beams > 1:
            samples = model.search(beams)
        else:
            samples = model.sample(
                repetitions=_repetitions(prompts),
                num_rows=1 if stream else batch_size,
                stream=stream,
            )
        for prompt, sample in zip(prompts, samples, strict=True):
            sample["prompt"] = prompt
            if not stream:
                print(f"{prompt}{sample['text']}\n", flush=True)
        if output:
            write_json(output, [{"prompt": each.pop("prompt"), **each} for each in samples])


def _repetitions(prompts: Sequence[str]) -> list[int]:
    """Number of equal prompts before each one."""
    seen = Counter[str]()
    numbers = []
    for prompt in prompts:
        numbers.append(seen[prompt])
        seen[prompt] += 1
    return numbers


def _check(
    prompts: tuple[str, ...],
    ends: Ends,
    *,
    beams: BeamSettings,
    batch_size: int,
    sampling: Sampling,
) -> None:
    if not prompts:
        raise UserError("prompts: none given; name at least one text to continue")
    for name, value in (
        ("max_new_tokens", ends.max_new_tokens),
        ("num_beams", beams.num_beams),
        ("batch_size", batch_size),
    ):
        if value < 1:
            raise UserError(f"{name}: {value}: too small; give 1 or more")
    if not -10 <= beams.length_penalty <= 10:
        raise UserError(f"length_penalty: {beams.length_penalty}: out of range; give -10 to 10")
    if "" in ends.stop:
        raise UserError("stop: an empty text would end everything; remove it")
    sampling.check()
