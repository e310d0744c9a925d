"""What a run may be told: a Pydantic model per section of config/config.yaml, a docstring a field.

Values come from YAML, through the workflow or `tokamake train --config`, and leave frozen.
Nothing here knows where a run takes place: that is the profiles' business.
"""

import functools
import json
import math
import operator
import os
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from tokamake import files, plugins
from tokamake.validation import read_yaml, validate

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._]*$")]
"""A word that becomes part of a file name; no hyphen, since `-` sets off a merged file's number."""


def plug_in(folder: str, *, optional: bool = False) -> AfterValidator:
    """Check that a field names a plug-in of a folder, or is empty where it is `optional`."""

    def known(name: str) -> str:
        if name not in plugins.names(folder) and (name or not optional):
            raise ValueError(f"unknown name; choose one of {', '.join(plugins.names(folder))}")
        return name

    return AfterValidator(known)


def split_shares(text: str) -> list[float]:
    """Normalize a split such as "949,50,1" to shares that add up to 1.

    Raises:
        ValueError: not three finite numbers, one is negative, or all are zero.
    """
    try:
        parts = [float(part) for part in text.split(",")]
    except ValueError:
        parts = []
    # Not sum(): that compensates rounding since Python 3.12, and Megatron's does not.
    whole = functools.reduce(operator.add, parts, 0.0)
    if len(parts) != 3 or not min(parts) >= 0 or not 0 < whole < math.inf:
        raise ValueError('give three non-negative numbers, train,valid,test, as in "949,50,1"')
    return [part / whole for part in parts]


def _split(text: str) -> str:
    split_shares(text)
    return text


class Settings(BaseModel):
    """Base of all sections: unknown keys are errors, values do not change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=()
    )


class SampleCorpus(Settings):
    """One corpus that `sample_corpus` harvests from the Python standard library."""

    num_files: Annotated[int, Field(ge=1)] = 4
    """Number of jsonl files; the last one is gzipped."""
    file_bytes: Annotated[int, Field(ge=1000)] = 1_000_000
    """Largest size of one file, in bytes of uncompressed jsonl; `plan` counts with it."""


class TokenizerSettings(Settings):
    """Which tokenizer turns text into tokens."""

    path: Path | None = None
    """Folder or file of a tokenizer: tokenizer.json, GPT-2 vocab.json + merges.txt,
    SentencePiece .model, or BERT vocab.txt. Empty: train one on the corpora."""
    kind: Literal["bpe", "wordpiece", "unigram"] = "bpe"
    """What is trained when `path` is empty: byte-level BPE as GPT-2's, BERT's WordPiece, or
    Unigram over bytes."""
    vocab_size: Annotated[int, Field(ge=300)] = 8192
    """Entries of the tokenizer that is trained when `path` is empty."""
    special_tokens: tuple[str, ...] = ()
    """Special tokens it has besides those of its kind, as fill-in-the-middle needs."""
    train_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    """Text it is trained on, at most, taken evenly from all raw files."""


class PlanSettings(Settings):
    """How raw files are cut into shards and shards gathered into merged files."""

    shard_bytes: Annotated[int, Field(ge=1)] = 1_000_000_000
    """Raw bytes of a shard, about: small files share a shard, a larger plain jsonl or parquet file
    is cut at line ends or row groups."""
    max_jobs: Annotated[int, Field(ge=1)] = 500
    """Most `tokenize` jobs of a plan, about: beyond it, several shards are made by one job."""
    merged_bytes: Annotated[int, Field(ge=1)] = 5_000_000_000
    """Size of one merged .bin file, about."""
    token_bytes_per_text_byte: Annotated[float, Field(gt=0)] = 0.5
    """Estimate of .bin bytes per byte of uncompressed jsonl: about 0.5 for vocabularies below
    65,500 entries (2 bytes a token, 4 bytes of text a token), 1.0 above."""


class TokenizeSettings(Settings):
    """How documents become sequences of tokens."""

    append_eod: bool = True
    """End each document with the tokenizer's end-of-document token."""
    prepend_bos: bool = False
    """Begin each document with the tokenizer's beginning-of-sequence token."""
    split_sentences: bool = False
    """Make each sentence a sequence of its own, as BERT, T5 and ICT data want."""
    language: Annotated[str, Field(pattern=r"^[a-z]{2,3}$")] = "en"
    """Language of the text, as an ISO 639 code, for `split_sentences`."""
    empty_documents: Literal["skip", "keep"] = "skip"
    """Documents without a token: left out, or kept as documents without a sequence, as Megatron-LM
    does; counted either way."""
    on_bad_document: Literal["stop", "quarantine"] = "stop"
    """A document that cannot be read stops the stage or goes to <shard>.quarantine.jsonl."""
    max_bad_fraction: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Largest share of a shard's documents that may be quarantined."""
    deduplicate: bool = False
    """Leave out documents whose text has come before in the same corpus."""


class ModelSettings(Settings):
    """Where training starts from: a Hugging Face checkpoint, or random weights."""

    architecture: Path | None = Path("config/models/tiny-llama.yaml")
    """Shape of the randomly initialized model that `init_model` makes; unused with `checkpoint`."""
    checkpoint: Path | None = None
    """Folder of a Hugging Face checkpoint (config.json and safetensors) to continue from."""


class OptimizerSettings(Settings):
    """The optimizer; weight decay spares norms and biases."""

    name: Annotated[str, plug_in("optim")] = "adamw"
    """A file name in lib/tokamake/optim."""
    learning_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 3e-4
    """Peak learning rate, reached after warm-up."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Decay of the mean of gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    """Decay of the mean of squared gradients."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    """Decoupled weight decay."""


class ScheduleSettings(Settings):
    """Learning rate over the run, as a share of the peak."""

    name: Annotated[str, plug_in("schedules")] = "cosine"
    """A file name in lib/tokamake/schedules."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly from 0 to its peak."""
    min_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of the peak at the end of the run."""


class FimSettings(Settings):
    """Fill-in-the-middle: training documents rearranged so that the model learns to fill gaps."""

    rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of documents that are rearranged; 0: none."""
    spm_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the rearranged whose suffix comes first (SPM), before the prefix (PSM)."""
    split_token: str = ""
    """Special token that parts a document, as a repository into files; empty: nothing does."""
    fragment_rate: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the parts of such a document that are rearranged, each by itself."""
    prefix: str = "<fim_prefix>"
    """Special token before the prefix."""
    suffix: str = "<fim_suffix>"
    """Special token before the suffix."""
    middle: str = "<fim_middle>"
    """Special token before the middle."""


class TrainSettings(Settings):
    """The training run itself."""

    sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens that the model sees per sample; a sample holds one more, the last label."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 1
    """Samples per rank and forward pass."""
    global_batch_size: Annotated[int, Field(ge=1)] = 8
    """Samples per step over all ranks; a multiple of micro_batch_size × ranks."""
    train_steps: Annotated[int, Field(ge=1)] | None = 1000
    """Optimizer steps of the whole run; empty: as many as the corpora's epochs give, exactly."""
    split: Annotated[str, AfterValidator(_split)] = "98,1,1"
    """Shares of each merged file's documents for training, validation and test; a corpus may name
    its own in the column `sets` of the table of corpora."""
    split_rule: Literal["megatron_core", "megatron_deepspeed"] = "megatron_core"
    """How shares become documents: as megatron-core rounds bounds, or Megatron-DeepSpeed parts."""
    blend: Literal["weighted", "exact", "corpora"] = "weighted"
    """Order of samples: as Megatron draws files by weight; exact in integers, of files; or of
    corpora, each ordered by `within_corpus`."""
    within_corpus: Literal["concatenated", "shuffled", "blended"] = "shuffled"
    """Order inside a corpus where corpora are blended: files one after the other, all samples
    shuffled, or files blended by their weights."""
    separate_last_epoch: bool | None = None
    """Shuffle a last epoch that is used in part by itself; empty: if less than 80 % of it is used,
    as Megatron does."""
    drop_last_partial_sequence: bool = True
    """Leave out the last tokens of a validation set where they do not fill a sample; else the
    sample is filled up with what has no loss."""
    fim: FimSettings = FimSettings()
    """Fill-in-the-middle."""
    reset_position_ids: bool = False
    """Count positions anew in each document of a sample."""
    reset_attention_mask: bool = False
    """Let no token attend to those of other documents in its sample."""
    eod_mask_loss: bool = False
    """Leave out the loss of what follows an end of document, which nothing foretells."""
    optimizer: OptimizerSettings = OptimizerSettings()
    """Optimizer and its rates."""
    schedule: ScheduleSettings = ScheduleSettings()
    """Learning rate over time."""
    gradient_clipping: Annotated[float, Field(ge=0)] = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Number format of forward and backward; optimizer states stay fp32."""
    zero_stage: Literal[0, 1, 2, 3] = 1
    """DeepSpeed ZeRO stage: what is partitioned over data-parallel ranks."""
    log_interval: Annotated[int, Field(ge=1)] = 10
    """Steps between log lines."""
    evaluation_interval: Annotated[int, Field(ge=1)] = 100
    """Steps between measurements of the validation loss."""
    evaluation_steps: Annotated[int, Field(ge=0)] = 10
    """Global batches per measurement; 0 turns validation off."""
    save_interval: Annotated[int, Field(ge=1)] = 1000
    """Steps between checkpoints; the last step always saves one."""

    @model_validator(mode="after")
    def _fit_together(self) -> "TrainSettings":
        if self.global_batch_size % self.micro_batch_size:
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not a multiple of "
                f"micro_batch_size {self.micro_batch_size}"
            )
        if self.train_steps and self.schedule.warmup_steps > self.train_steps:
            raise ValueError(
                f"schedule.warmup_steps: {self.schedule.warmup_steps}: more than train_steps "
                f"{self.train_steps}; the rate would never reach its peak, lower it"
            )
        if self.precision == "bf16" and self.zero_stage == 0:
            # DeepSpeed would train in bf16 alone, with a much larger error.
            raise ValueError(
                "zero_stage: 0: keeps no fp32 weights beside bf16; set it to 1 or precision to fp32"
            )
        return self


PACKING_SETTINGS = ("reset_position_ids", "reset_attention_mask", "eod_mask_loss")
"""Training settings about documents that share a sample, which need the end-of-document token."""

INDEX_SETTINGS = (
    "sequence_length",
    "split",
    "split_rule",
    "blend",
    "within_corpus",
    "separate_last_epoch",
    "drop_last_partial_sequence",
)
"""Training settings that decide the index: options of that stage, compared when a run starts."""


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


class Config(Settings):
    """Everything that decides what is built."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "tiny"
    """Name of the training run; its files lie in results/<run>/."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 1234
    """Seed of weights, sample order and sampling."""
    corpora: Path = Path("config/corpora.tsv")
    """Tab-separated table: corpus, files, text_key, and weight, epochs or temperature."""
    sample_corpus: dict[Name, SampleCorpus] = {}
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
    evaluate: EvaluateSettings = EvaluateSettings()
    """Evaluation."""
    generate: GenerateSettings = GenerateSettings()
    """Generation."""

    @model_validator(mode="after")
    def _known_samples(self) -> "Config":
        for name in self.sample_corpus:
            if name not in ("code", "docs"):
                raise ValueError(f"sample_corpus has no corpus {name!r}; choose code or docs")
        if self.run in ("raw", "data", "tokenizer", "benchmarks", "report.html"):
            raise ValueError(
                f"run: {self.run!r}: results/{self.run} has another use; rename the run"
            )
        if self.model.architecture is None and self.model.checkpoint is None:
            raise ValueError("model needs an architecture or a checkpoint")
        return self


class Architecture(Settings):
    """Shape of a model, in Hugging Face's terms."""

    family: Annotated[str, plug_in("models")] = "llama"
    """A file name in lib/tokamake/models."""
    vocab_size: Annotated[int, Field(ge=1)] | None = None
    """Rows of the embedding; empty: the tokenizer's vocabulary size."""
    hidden_size: Annotated[int, Field(ge=1)]
    """Width of the residual stream."""
    intermediate_size: Annotated[int, Field(ge=1)]
    """Width inside the MLP."""
    num_hidden_layers: Annotated[int, Field(ge=1)]
    """Transformer blocks."""
    num_attention_heads: Annotated[int, Field(ge=1)]
    """Query heads."""
    num_key_value_heads: Annotated[int, Field(ge=1)]
    """Key and value heads: as many as query heads for MHA, 1 for MQA."""
    max_position_embeddings: Annotated[int, Field(ge=1)] = 2048
    """Longest sequence the model is meant for."""
    rms_norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Added to the mean square in RMSNorm."""
    rope_theta: Annotated[float, Field(gt=0)] = 10000.0
    """Base of the rotary position frequencies."""
    tie_word_embeddings: bool = False
    """Share the embedding with the output layer."""
    initializer_range: Annotated[float, Field(gt=0)] = 0.02
    """Standard deviation of random weights."""

    @model_validator(mode="after")
    def _whole_heads(self) -> "Architecture":
        if self.hidden_size % self.num_attention_heads:
            raise ValueError("hidden_size is not a multiple of num_attention_heads")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError("num_attention_heads is not a multiple of num_key_value_heads")
        if self.head_dim % 2:
            raise ValueError("hidden_size / num_attention_heads is odd; rotary needs pairs")
        return self

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_attention_heads


class ResolvedTrainSettings(TrainSettings):
    """Training settings whose length is known."""

    train_steps: Annotated[int, Field(ge=1)]
    """Optimizer steps of the whole run."""


class Run(Settings):
    """A training run ready to start: what `resolve` writes and `tokamake train --config` reads."""

    run: str
    """Name of the run."""
    seed: int
    """Seed of everything random."""
    checkpoint: Path
    """Megatron-DeepSpeed checkpoint whose weights the run starts from."""
    index: Path
    """Folder of sample indexes and blend that `index` made."""
    data_root: Path
    """Folder that the index's data prefixes are relative to."""
    tokenizer: Path | None = None
    """Tokenizer of the pairs, which fill-in-the-middle needs."""
    eod: int | None = None
    """Token that ends a document, where settings about documents in a sample need it."""
    output: Path
    """Folder of the run's checkpoints, metrics.jsonl and TensorBoard events."""
    architecture: Architecture
    """Shape of the model, taken from the checkpoint."""
    train: ResolvedTrainSettings
    """Training settings."""


def read_architecture(path: Path) -> Architecture:
    """Read one file of config/models."""
    value = read_yaml(path, "fix model.architecture or choose a file of config/models")
    return validate(Architecture, value, str(path))


ROOT_VARIABLE = "TOKAMAKE_DATA_ROOT"
"""Environment variable that names the folder which prefixes of pairs are relative to."""


def read_run(path: Path) -> Run:
    """Read a resolved run, as `resolve` writes it; its data may have moved to another root."""
    run = validate(Run, read_yaml(path, "make it with `tokamake resolve`"), str(path))
    named = os.environ.get(ROOT_VARIABLE)
    return run.model_copy(update={"data_root": Path(named)}) if named else run


def write_run(path: Path, run: Run) -> None:
    """Write a resolved run as YAML, every default spelled out."""
    files.write_text(path, yaml.safe_dump(run.model_dump(mode="json"), sort_keys=False))


def schema() -> str:
    """JSON schema of config.yaml, for editors; config/schema.json holds this text."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"
