"""Objectives by name: their settings, and their demands on data and model.

An objective is a folder in `train/objectives/`. Its module `data`, without torch, has a class
`Data`, derived from `ObjectiveData`. A module `settings` with a class `Section`, derived from
`ObjectiveSection`, adds a section to `train`, named after the objective.
"""

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, Field

from tokamake import plugins
from tokamake.config.fields import Settings
from tokamake.errors import choice

DEFAULT = "causal"
"""Objective of a run that names none, and of an index whose index.json names none."""
TASK_DEFAULT = "classification"
"""Objective of a task that names none."""
_KIND = "train/objectives/*/data"
_SETTINGS = "train/objectives/*/settings"


class ObjectiveSection(Settings):
    """Section of `train` that an objective has."""

    without_effect: ClassVar[tuple[str, ...]] = ()
    """Fields that decide no weights."""


class IndexedObjective(NamedTuple):
    """Facts of an objective that decide the samples of an index."""

    stated: dict[str, Any]
    """Entry of index.json, with the objective's name; empty: there is none."""
    pieces: Any = None
    """(vocabulary,) uint8 kind of each token, where whole words are masked."""
    tokenizer: Any = None
    """Tokenizer that must have made the datasets."""
    companions: dict[str, str] = {}  # noqa: RUF012
    """Datasets with a companion that is read along with them, and its name."""


class ObjectiveData:
    """Settings of an objective, its datasets, and its samples.

    `train`, `tokenize` and `tokenizer` are the sections of the config, `architecture` the model's.

    Attributes:
        stacks: stacks of layers of the families that learn it, as their constant `STACKS`: decoder,
            encoder or encoder_decoder. Empty: `train.objective` cannot name it.
        has_sentences: whether the sequences of its datasets are sentences, not documents.
        generates: whether its models predict the next token: evaluate and generate take them.
        continues_prompts: whether a model can do so from a prompt alone, while it trains.
        embeds: whether its models give texts vectors: the section `retrieval` searches with them.
        masks: whether it masks words, by the settings of `train.masking`.
        has_padding: whether samples may be shorter than `train.sequence_length`.
        has_epochs: whether samples are rows of files, which no index orders.
        megatron_program: Megatron's script that trains it, if it trains nothing else.
    """

    stacks = "decoder"
    has_sentences = False
    masks = False
    generates = False
    continues_prompts = False
    embeds = False
    has_padding = False
    has_epochs = False
    megatron_program = ""

    # ---- Settings and model ----

    def check_settings(self, train: Any) -> None:
        """Raise ValueError if settings of `train` do not fit."""

    def check_model(self, train: Any, architecture: Any) -> None:
        """Refuse a model without the layers that the samples need."""

    def check_lengths(self, train: Any, limit: int, *, source: str) -> None:
        """Refuse stacks longer than the `limit` of the model `source`, `sequence_length` aside."""

    def stack_lengths(self, train: Any) -> list[int]:
        """Tokens of a sample in each stack of layers; the encoder comes first."""
        return [train.sequence_length]

    def labeled_share(self, train: Any) -> float:  # noqa: ARG002
        """Share of the tokens that need logits."""
        return 1.0

    def uniform_loss(self, train: Any, architecture: Any) -> float:  # noqa: ARG002
        """Loss in nats of a model that finds all answers equally likely; 0: there is none."""
        return 0.0 if architecture.has_towers else math.log(architecture.vocab_size or 1)

    def finetuned_architecture(self, pretrained: Any, task: Any) -> Any:
        """Shape of a model that learns a task, by a pretrained one; refuse one that cannot."""
        raise NotImplementedError

    # ---- Datasets that the workflow makes ----

    def check_tokenize(self, tokenize: Any) -> None:
        """Refuse settings whose datasets do not fit."""

    def check_tokenizer(self, tokenizer: Any) -> None:
        """Refuse settings whose tokenizer does not fit."""

    def check_corpus(self, train: Any, corpus: Any) -> None:
        """Refuse a row of the table of corpora whose datasets would not fit."""

    def check_first_texts(self, train: Any, corpus: Any, *, file: Path) -> None:
        """Refuse a raw file of a corpus by its first documents."""

    # ---- Samples ----

    def sample_settings(self, train: Any) -> dict[str, Any]:  # noqa: ARG002
        """Settings that decide the samples, as index.json has them; `name` is the objective's."""
        return {}

    def indexed(self, train: Any, tokenizer: Path | None) -> IndexedObjective:  # noqa: ARG002
        """Facts that decide the samples of an index."""
        return IndexedObjective(self.sample_settings(train))

    def companion_key(self, train: Any) -> str:  # noqa: ARG002
        """Text key of the datasets that are read along, such as titles; empty: there are none."""
        return ""

    def companions(
        self,
        stated: dict[str, Any],  # noqa: ARG002
        prefixes: list[str],  # noqa: ARG002
    ) -> dict[str, list[str]]:
        """Map datasets to the names that a companion, read along with them, may have.

        Document n of the companion belongs to document n of the dataset. `stated` is the entry of
        index.json. Datasets of an objective without companions are no keys.
        """
        return {}

    def check_companion(self, prefix: Path, companion: Path) -> None:
        """Refuse a companion whose documents belong to others."""

    def further_data(self, folder: Path, index: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG002
        """Digests of data beside an index that decide training samples, by the data's name.

        Args:
            folder: of the index.
            index: its index.json.
        """
        return {}

    def make_indexer(self, settings: Any, **options: Any) -> Any:
        """Make the `DatasetIndexer` of a split, see `data.samples.dataset_indexers`."""
        raise NotImplementedError

    def open_samples(self, folder: Path, **options: Any) -> Any:
        """Open the samples of a split of an index, see `data.samples.loader.SplitSamples`."""
        raise NotImplementedError


def objective_data(name: str) -> ObjectiveData:
    data: ObjectiveData = plugins.load(_KIND, name).Data()
    return data


def objective_of(program: str) -> str | None:
    """Objective that a script of Megatron trains, such as pretrain_bert; None: the default."""
    names = (n for n in plugins.names(_KIND) if objective_data(n).megatron_program == program)
    return next(names, None) if program else None


def objectives_of(stacks: str) -> tuple[str, ...]:
    """Objectives that families with such stacks learn."""
    return tuple(name for name in plugins.names(_KIND) if objective_data(name).stacks == stacks)


def sentence_objectives() -> str:
    """Names of the objectives of sentences, for messages."""
    return _joined(name for name in plugins.names(_KIND) if objective_data(name).has_sentences)


def masking_objectives() -> str:
    """Names of the objectives that mask words, for messages."""
    return _joined(name for name in plugins.names(_KIND) if objective_data(name).masks)


def _joined(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} or {last}"


def sample_settings(train: Any) -> dict[str, Any]:
    """Settings that decide the samples of a run, as index.json has them."""
    return objective_data(train.objective).sample_settings(train)


def companion_key(train: Any) -> str:
    """Text key of the datasets that a run reads along with its own; empty: there are none."""
    return objective_data(train.objective).companion_key(train)


def _check_name(name: str) -> str:
    known = [each for each in plugins.names(_KIND) if objective_data(each).stacks]
    if name not in known:
        raise ValueError(f"unknown name; {choice(name, known)}")
    return name


ObjectiveName = Annotated[str, AfterValidator(_check_name)]


def _check_task_name(name: str) -> str:
    known = [each for each in plugins.names(_KIND) if objective_data(each).has_epochs]
    if name not in known:
        raise ValueError(f"no objective of a task; choose one of {', '.join(known)}")
    return name


SECTIONS: dict[str, type[ObjectiveSection]] = {
    name: plugins.load(_SETTINGS, name).Section for name in plugins.names(_SETTINGS)
}
"""Sections of `train` that objectives have, by the objective's name."""


def section_fields() -> dict[str, Any]:
    """Fields of `train` that are sections of objectives, for `create_model`; None: defaults."""
    return {
        name: (section | None, Field(None, description=section.__doc__))
        for name, section in SECTIONS.items()
    }


def check_sections(train: Any) -> None:
    """Raise ValueError if `train` has the section of another objective."""
    for name in SECTIONS:
        if name != train.objective and getattr(train, name) is not None:
            raise ValueError(
                f"{name}: no effect on objective {train.objective}; remove it, or set objective to "
                f"{name}"
            )


def objective_section(train: Any) -> Any:
    """Section of the objective of `train`, with its defaults if it is empty."""
    return getattr(train, train.objective) or SECTIONS[train.objective]()


TaskObjectiveName = Annotated[str, AfterValidator(_check_task_name)]
"""Objective of a run that finetunes."""
