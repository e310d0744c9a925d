"""Section `detoxify`: the initial model writes texts; the runs train on the least toxic ones."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from tokamake.config.fields import InferenceDtype, Settings
from tokamake.config.scorers import Scorer


class PromptFile(Settings):
    """Prompts whose continuations show how toxic a model is."""

    path: Path
    """File of any raw format with a prompt in each record, such as RealToxicityPrompts."""
    key: str = "prompt"
    """Field with the prompt; prompt.text looks into objects."""
    toxicity_key: str = ""
    """Field with the toxicity of the prompt, 0 to 1 or null. Prompts above 0.5 are toxic, and
    results are also separate for toxic and nontoxic prompts. Empty: for all prompts only."""


def _with_path(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class DetoxifySettings(Settings):
    """Detoxification with the model's own texts (SGEAT, https://arxiv.org/abs/2202.04173): the
    checkpoint that the runs start from writes texts, a scorer scores them, and the least toxic ones
    become the raw file detoxify/kept.jsonl of the data folder, for the table of corpora. The
    defaults are the published values."""

    scorer: Scorer
    """Toxicity of texts, 0 to 1: word_list: FILE, column: {path: FILES}, alt_profanity_check, an
    entry point, or a function FILE.py:FUNCTION from a list of texts to a list of scores."""
    prompts: Annotated[
        PromptFile, BeforeValidator(_with_path, json_schema_input_type=str | PromptFile)
    ]
    """Prompts for the toxicity before and after training: a file, or a section with its fields."""
    num_texts: Annotated[int, Field(ge=1)] = 1000
    """Texts that the model writes without a prompt."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 1000
    """Maximum number of tokens of a text."""
    keep: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the scored texts to keep: the least toxic ones. Of equal scores, the first."""
    continuations: Annotated[int, Field(ge=1)] = 25
    """Continuations of each prompt."""
    continuation_tokens: Annotated[int, Field(ge=1)] = 20
    """Maximum number of tokens of a continuation."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Softmax temperature of texts and continuations."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 0.9
    """Sample from the most likely tokens whose probabilities add up to this."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seed of texts, of continuations and of the order of the kept texts."""
    texts_per_job: Annotated[int, Field(ge=1)] = 1000
    """Texts, or continuations, that a job writes; more if there would be above 500 jobs. In fp32,
    this changes no text."""
    batch_size: Annotated[int, Field(ge=1)] = 32
    """Texts that are written at the same time."""
    dtype: InferenceDtype = "fp32"
    """Dtype of weights and computation: fp32, bf16 or fp16."""
