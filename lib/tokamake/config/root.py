"""What config/config.yaml holds as a whole, and its schema."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tokamake.config.data import PlanSettings, SampleCorpus, TokenizerSettings, TokenizeSettings
from tokamake.config.fields import Name, Settings
from tokamake.config.model import ADAMS, CheckpointForms, ModelSettings, parse_export_format
from tokamake.config.training import TrainSettings


class EvaluateSettings(Settings):
    """Held-out evaluation of the exported model."""

    max_tokens: Annotated[int, Field(ge=2)] = 1_000_000
    """Most tokens scored per corpus."""


class GenerateSettings(Settings):
    """Samples drawn from the exported model."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = ("The", "Return a", "def ")
    """Texts to continue."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Tokens added to each prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Softmax temperature; 0 always takes the likeliest token."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Draw among this many likeliest tokens; 0 among all."""


_NO_RUNS = (
    *("raw", "data", "tokenizer", "import", "compare", "benchmarks"),
    *("report.html", "config.json"),
)
"""What else is in the folder of results."""


class Config(Settings):
    """Everything that decides what is built."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "tiny"
    """Name of the training run; its files lie in results/<run>/."""
    runs: Path | None = None
    """Table of several runs that share their data, instead of one: the column run has their names,
    others are called as settings, train.optimizer.learning_rate; cells replace what stands here."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seed of weights, sample order and sampling."""
    corpora: Path = Path("config/corpora.tsv")
    """Tab-separated table: corpus, files, text_key, and weight, epochs or temperature."""
    sample_corpus: dict[Name, SampleCorpus] = Field(default_factory=dict)
    """Corpora harvested from the Python standard library into results/raw/<corpus>/: code, docs."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    """Tokenizer, given or trained."""
    plan: PlanSettings = PlanSettings()
    """Sizes of shards and merged files."""
    tokenize: TokenizeSettings = TokenizeSettings()
    """Tokenization."""
    model: ModelSettings = ModelSettings()
    """Start of training."""
    train: TrainSettings = TrainSettings()
    """Training."""
    convert: CheckpointForms = ()
    """What the trained model is written as, too: a format of `tokamake convert`, its layout, its
    dtype, as in mds-pipeline-tp2-pp4, mds-tp2-dp4-zero1-bf16 (with optimizer states) or hf-bf16; it
    lies in results/<run>/convert/<name>."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation."""
    generate: GenerateSettings = GenerateSettings()
    """Generation."""

    @model_validator(mode="after")
    def _known_samples(self) -> "Config":
        for name in self.sample_corpus:
            if name not in ("code", "docs"):
                raise ValueError(f"sample_corpus has no corpus {name!r}; choose code or docs")
        if self.run in _NO_RUNS:
            raise ValueError(
                f"run: {self.run!r}: results/{self.run} has another use; rename the run"
            )
        if self.model.architecture is None and self.model.checkpoint is None:
            raise ValueError("model needs an architecture or a checkpoint")
        return self

    @model_validator(mode="after")
    def _known_states(self) -> "Config":
        name = self.train.optimizer.name
        for form in self.convert:
            if parse_export_format(form).sizes.get("zero_stage") and name not in ADAMS:
                raise ValueError(
                    f"convert: {form}: a zero form holds states of {' and '.join(ADAMS)}, not "
                    f"of {name}; leave dp and zero out, or take universal"
                )
        return self

    @model_validator(mode="after")
    def _known_start(self) -> "Config":
        finetune, checkpoint = self.train.finetune, self.model.checkpoint
        if checkpoint is not None and finetune is None:
            raise ValueError(
                "train.finetune: missing, with model.checkpoint; add true (its weights alone, from "
                "step 0) or false (continue with its optimizer states at its step)"
            )
        if checkpoint is None and finetune is not None:
            raise ValueError(
                f"train.finetune: {str(finetune).lower()}: there is no model.checkpoint; name one, "
                "or leave this out to start from random weights"
            )
        return self


def schema() -> str:
    """JSON schema of config.yaml, for editors; config/schema.json holds this text."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(schema(), end="")
