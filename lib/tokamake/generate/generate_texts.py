"""Stage `generate-texts`: texts of a model without a prompt, or several continuations a prompt."""

from pathlib import Path
from typing import Any

from tokamake.data.corpus.prompts import read_prompts
from tokamake.errors import UserError
from tokamake.generate.continuations import Ends, Request, continuing
from tokamake.inference.layout import WHOLE_MODEL, InferenceLayout
from tokamake.inference.sampling_settings import Sampling

_SAMPLING = Sampling(temperature=1.0, top_k=0, top_p=0.9)


def generate_texts(
    *,
    checkpoint: Path,
    tokenizer: Path | None = None,
    num_texts: int,
    first: int = 0,
    prompts: Path | None = None,
    prompt_key: str = "prompt",
    toxicity_key: str = "",
    continuations: int = 25,
    max_new_tokens: int = 1000,
    sampling: Sampling = _SAMPLING,
    batch_size: int = 32,
    layout: InferenceLayout = WHOLE_MODEL,
    output: Path,
) -> None:
    """Write texts with a model: new documents, or continuations of the prompts of a file.

    Text number k depends on the model, the seed, k, its prompt and the settings only, so several
    jobs can write parts of the texts. With prompts, the first texts continue the first prompt.

    Args:
        checkpoint: folder of a checkpoint of any format, or of a run, whose newest one counts.
        tokenizer: tokenizer of the model; by default, the tokenizer beside its weights, or the
            tokenizer that the run.yaml of the checkpoint names.
        num_texts: texts to write.
        first: number of the first of them.
        prompts: file of any raw format with a prompt in each record; by default, a text is a new
            document.
        prompt_key: field with the prompt.
        toxicity_key: field with the toxicity of the prompt; empty: none.
        continuations: texts for each prompt.
        max_new_tokens: maximum tokens of a text.
        sampling: how the next token is chosen.
        batch_size: texts that are written at the same time.
        layout: how ranks share the model.
        output: jsonl file to write: text, and with prompts prompt, prompt_number and
            prompt_toxicity.
    """
    import json

    from tokamake.files import atomic

    for name, value, least in (
        *(("num_texts", num_texts, 1), ("first", first, 0), ("batch_size", batch_size, 1)),
        *(("continuations", continuations, 1), ("max_new_tokens", max_new_tokens, 1)),
    ):
        if value < least:
            raise UserError(f"{name}: {value}: too small; give {least} or more")
    sampling.check()
    numbers = range(first, first + num_texts)
    lines: list[dict[str, Any]] = [{"text": ""} for _ in numbers]
    if prompts:
        known = read_prompts(prompts, key=prompt_key, toxicity_key=toxicity_key)
        if (total := len(known) * continuations) < numbers.stop:
            raise UserError(f"{prompts}: has {total:,} continuations, fewer than {numbers.stop:,}")
        for line, number in zip(lines, numbers, strict=True):
            prompt = known[number // continuations]
            line |= {"prompt": prompt.text, "prompt_number": number // continuations}
            line |= {"prompt_toxicity": prompt.toxicity}
    texts = tuple(line.get("prompt", "") for line in lines)
    request = Request(texts, Ends(max_new_tokens), sampling)
    with continuing(checkpoint, tokenizer, request=request, layout=layout) as model:
        if model is None:
            return
        samples = model.sample(repetitions=numbers, num_rows=batch_size)
        with atomic(output) as (path,), path.open("w", encoding="utf-8") as file:
            for line, sample in zip(lines, samples, strict=True):
                file.write(json.dumps({**line, "text": sample["text"]}, ensure_ascii=False) + "\n")
    print(f"{output}: {num_texts:,} texts")
