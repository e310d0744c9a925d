"""The whole config (config/config.yaml) and its JSON schema."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from tokamake.config.data import PlanSettings, SampleCorpus, TokenizerSettings, TokenizeSettings
from tokamake.config.data_set import DEFAULT, RESERVED_NAMES
from tokamake.config.detoxify import DetoxifySettings
from tokamake.config.fetch_urls import FetchUrlsSettings
from tokamake.config.fields import InferenceDtype, Matching, Name, Settings
from tokamake.config.finetune import FinetuneSettings, check_train_settings
from tokamake.config.model import CheckpointForms, ModelSettings, parse_export_format
from tokamake.config.objective import objective_data
from tokamake.config.optimization import zero_file_optimizers
from tokamake.config.retrieval import RetrievalSettings
from tokamake.config.tasks import Tasks
from tokamake.config.training import TrainSettings, check_finetune
from tokamake.errors import UserError
from tokamake.remote.hub_models import unfetched


class EvaluateSettings(Settings):
    """Evaluation of the exported model on held-out data."""

    max_tokens: Annotated[int, Field(ge=2)] = 1_000_000
    """Maximum number of tokens to score per corpus."""
    dtype: InferenceDtype = "fp32"
    """Dtype of weights and computation: fp32, bf16 or fp16. Losses are computed in fp32."""
    batch_size: Annotated[int, Field(ge=1)] = 8
    """Sequences per forward pass, also of tasks. It changes memory and time, not the scores."""
    tasks: Tasks = Field(default_factory=dict)
    """Tasks that score the model, after each segment too: name of the task → its settings. The
    setting `name` is a plug-in in evaluate/tasks/, by default the name of the task."""


class ExportSettings(Settings):
    """Export of the trained model in Hugging Face's format."""

    license: str | None = None
    """Licence of the model for its model card, such as apache-2.0. Empty: the card names none."""
    push: (
        Annotated[
            str,
            Matching(r"^hf://[\w.-]+/[\w.-]+(@[^/]+)?$", "hf://ORG/NAME or hf://ORG/NAME@REVISION"),
        ]
        | None
    ) = None
    """Repository of the Hugging Face Hub, hf://ORG/NAME, that the export is uploaded to. Empty: it
    stays here."""
    private: bool = True
    """Whether a repository that `push` makes is private."""


class GenerateSettings(Settings):
    """Text generation with the exported model."""

    prompts: Annotated[tuple[str, ...], Field(min_length=1)] = ("The", "Return a", "def ")
    """Texts that the model continues."""
    max_new_tokens: Annotated[int, Field(ge=1)] = 64
    """Number of tokens to add to each prompt."""
    temperature: Annotated[float, Field(ge=0)] = 0.8
    """Softmax temperature. 0 always takes the most likely token."""
    top_k: Annotated[int, Field(ge=0)] = 50
    """Sample from this number of most likely tokens. 0: sample from all."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the most likely tokens whose probabilities add up to this."""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Sample from tokens that are at least this times as likely as the most likely one."""
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0
    """Divisor of positive logits, and factor of negative ones, of tokens that occurred before."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts at which a continuation ends."""
    num_beams: Annotated[int, Field(ge=1)] = 1
    """Continuations that beam search keeps. 1: sampling."""
    length_penalty: Annotated[float, Field(ge=-10, le=10)] = 1.0
    """Exponent of the length by which beam search divides log-probabilities."""
    dtype: InferenceDtype = "fp32"
    """Dtype of weights and computation: fp32, bf16 or fp16."""


RESERVED_RUNS = (
    *("raw", "data", "tokenizer", "extended_tokenizer", "import", "compare", "benchmarks"),
    *("report.html", "config.json"),
)
"""Other files and folders in results/."""


class Config(Settings):
    """The whole config: everything that determines the results."""

    run: Name = "tiny"
    """Name of the training run. Its files are in results/<run>/."""
    runs: Path | None = None
    """Tab-separated table of runs that share their data. The column `run` gives their names.
    Other columns are named after settings, for example train.optimizer.learning_rate; their cells
    override the values in this file. Empty: one run."""
    data_set: Name = DEFAULT
    """Name of the data that the runs share: tokenizer, datasets, report. `default` is in
    results/data, any other name in results/data/<data_set>. A config with another tokenizer, or
    with other corpora of the same names, needs another name."""
    replace_data: bool = False
    """Whether data that runs of other configs were trained on may be written again. It is meant for
    one start: `--config replace_data=true`."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seed of weights, sample order and text generation."""
    corpora: Path | None = Path("config/corpora.tsv")
    """Tab-separated table of corpora, with the columns corpus, files, text_key, and one of weight,
    epochs or temperature. With `weights`, it may be null."""
    weights: Path | None = None
    """Weighting file that lists existing indexed datasets: lines of `weight prefix corpus`, or
    pairs of `weight prefix` as for Megatron's --data-path. With a table of corpora too, the weights
    of both are on one scale."""
    data_root: Path | None = None
    """Folder that the prefixes in `weights` are relative to, or OLD=NEW for one that has moved.
    Empty: the folder of that file."""
    sample_corpus: dict[Name, SampleCorpus] = Field(default_factory=dict)
    """Corpora to extract from the Python standard library to results/raw/<corpus>/: code, docs."""
    fetch_urls: FetchUrlsSettings = FetchUrlsSettings()
    """Cleaning and fetching of lists of URLs."""
    tokenizer: TokenizerSettings = TokenizerSettings()
    """Existing tokenizer, or one to train."""
    plan: PlanSettings = PlanSettings()
    """Sizes of shards and merged datasets."""
    tokenize: TokenizeSettings = TokenizeSettings()
    """Tokenization."""
    model: ModelSettings = ModelSettings()
    """Architecture and initial checkpoint."""
    train: TrainSettings = TrainSettings()
    """Training."""
    finetune: FinetuneSettings | None = None
    """Finetuning on a task, in place of pretraining: such a run starts from model.checkpoint, a
    folder or another run of the table. Empty: the run pretrains."""
    convert: CheckpointForms = ()
    """Additional formats of the trained model: a format of `tokamake convert`, parallel sizes and a
    dtype, for example mds-pipeline-tp2-pp4, hf-bf16, or mds-tp2-dp4-zero1-bf16 (with optimizer
    states). Each is written to results/<run>/convert/<name>."""
    export: ExportSettings = ExportSettings()
    """Export in Hugging Face's format."""
    detoxify: DetoxifySettings | None = None
    """Detoxification: the initial model writes texts, the runs train on the least toxic ones, and
    toxicity is measured before and after. Empty: none."""
    retrieval: RetrievalSettings | None = None
    """Search with the biencoders of the runs, and its recall. Empty: none."""
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation."""
    generate: GenerateSettings = GenerateSettings()
    """Generation."""

    @property
    def corpus_table(self) -> Path | None:
        """The table of corpora. It has a default, which a config with `weights` does not want."""
        is_default = "corpora" not in self.model_fields_set
        return None if self.weights and is_default else self.corpora

    @property
    def prompts(self) -> tuple[str, ...]:
        """Texts that the model continues; with token ids as text, the end-of-document token."""
        if self.tokenizer.has_ids and "prompts" not in self.generate.model_fields_set:
            eod = self.tokenizer.eod
            return (str(self.tokenizer.vocab_size - 1 if eod is None else eod),)
        return self.generate.prompts

    @model_validator(mode="after")
    def _check(self) -> "Config":
        self._check_names()
        self._check_corpora()
        self._check_prompts()
        self._check_seed()
        self._check_zero_formats()
        self._check_task()
        self._check_finetune()
        return self

    def _check_names(self) -> None:
        for name in self.sample_corpus:
            if name not in ("code", "docs"):
                raise ValueError(f"sample_corpus has no corpus {name!r}; choose code or docs")
        if self.run in RESERVED_RUNS:
            raise ValueError(f"run: {self.run!r}: results/{self.run} is reserved; rename the run")
        if self.data_set in RESERVED_NAMES or self.data_set.endswith(".txt"):
            raise ValueError(
                f"data_set: {self.data_set!r}: results/data/{self.data_set} is reserved; rename it"
            )

    def _check_corpora(self) -> None:
        if self.corpora is None and self.weights is None:
            raise ValueError("corpora: null: no data; name a table of corpora, or set weights")
        if self.data_root is not None and self.weights is None:
            raise ValueError(f"data_root: {self.data_root}: no effect without weights; set weights")

    def _check_prompts(self) -> None:
        if not self.tokenizer.has_ids:
            return
        for prompt in self.prompts:
            for word in prompt.split():
                if not word.isdecimal() or int(word) >= self.tokenizer.vocab_size:
                    raise ValueError(
                        f"generate.prompts: {prompt!r}: tokenizer.kind is ids, but {word!r} is no "
                        f"token id below {self.tokenizer.vocab_size:,}; write prompts as token ids"
                    )

    def _check_seed(self) -> None:
        if objective_data(self.train.objective).has_sentences and self.seed == 0:
            raise ValueError(
                f"seed: 0: Megatron's order of sentences, which objective {self.train.objective} "
                "has, needs a seed of 1 or more"
            )

    def _check_zero_formats(self) -> None:
        optimizer = self.train.optimizer
        for form in self.convert:
            has_zero_files = parse_export_format(form).sizes.get("zero_stage")
            if has_zero_files and not optimizer.facts.zero_files:
                raise ValueError(
                    f"convert: {form}: zero formats hold optimizer states of "
                    f"{' and '.join(zero_file_optimizers())}, not of {optimizer.name}; remove dp "
                    "and zero, or use universal"
                )

    def _check_task(self) -> None:
        if self.finetune is None:
            return
        if self.model.checkpoint is None:
            raise ValueError(
                f"finetune.task: {self.finetune.task.name}: there is no model to finetune; name a "
                "folder or {run: NAME} in model.checkpoint"
            )
        if self.train.finetune is False:
            raise ValueError(
                "train.finetune: false: a run with the section finetune starts at step 0 with a "
                "new optimizer; remove this setting"
            )
        check_train_settings(self.train)

    def _check_finetune(self) -> None:
        if self.finetune is not None:
            return
        start = self.model.folder
        is_missing = start is not None and not start.exists() and not unfetched(start)
        if is_missing and self.train.finetune is None:
            raise ValueError(
                f"model.checkpoint: {start}: no such folder; give the folder of a checkpoint, and "
                "set train.finetune"
            )
        try:
            check_finetune(
                self.train, start="model.checkpoint is set" if self.model.checkpoint else None
            )
        except UserError as error:
            raise ValueError(str(error)) from None
        if self.train.finetune is not False and not self.train.load_optimizer:
            raise ValueError(
                "train.load_optimizer: false: only a run with train.finetune false loads optimizer "
                "states; remove this setting, or set finetune to false"
            )


def schema() -> str:
    """JSON schema of config.yaml for editors: the text of config/schema.json."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(schema(), end="")
