"""Settings and data of the objective ict."""

from itertools import islice
from pathlib import Path
from typing import Any

from tokamake.config.data import TokenizeSettings
from tokamake.config.objective import IndexedObjective, objective_section
from tokamake.config.train_fields import TrainFields
from tokamake.config.train_sections import MaskingSettings
from tokamake.errors import UserError
from tokamake.train.objectives._sentences import SentenceData


class Data(SentenceData):
    """Samples of a query, [CLS] sentence [SEP], and its block, [CLS] title [SEP] text [SEP]."""

    stacks, megatron_program = "biencoder", "pretrain_ict"
    embeds = True
    # Megatron-LM cuts blocks for [CLS] and two [SEP].
    name, num_special = "ict", 3
    unused = tuple(MaskingSettings.model_fields)
    word_use = "needs [CLS] and [SEP], which a WordPiece tokenizer has"

    def check_settings(self, train: TrainFields) -> None:
        """Also refuse texts as titles, samples that share rows, and accuracies over too
        many blocks."""
        super().check_settings(train)
        section = objective_section(train)
        if section.titles == section.text:
            raise ValueError(
                f"ict.titles: {section.titles}: is the key of the text, too; name the key of the "
                "titles, or set it to ''"
            )
        if (most := max(section.topk, default=0)) > train.global_batch_size:
            raise ValueError(
                f"ict.topk: {most}: more than the {train.global_batch_size} blocks of a global "
                "batch; give smaller numbers"
            )
        if train.pack_samples:
            raise ValueError("pack_samples: true: objective ict has a row for each text; remove it")

    def check_tokenize(self, tokenize: TokenizeSettings) -> None:
        """Also keep empty documents: a text without a title must not lose its place."""
        super().check_tokenize(tokenize)
        if tokenize.empty_documents != "keep":
            raise UserError(
                f"tokenize.empty_documents: {tokenize.empty_documents}: objective ict pairs each "
                "document with its title; set it to keep"
            )

    def check_corpus(self, train: TrainFields, corpus: Any) -> None:
        """Refuse a corpus without titles."""
        section = objective_section(train)
        keys = [] if corpus.template else corpus.text_key.split(",")
        if section.titles and not {section.text, section.titles} <= {*keys}:
            raise UserError(
                f"{corpus.where}: text_key: {corpus.text_key}: has no titles, which objective ict "
                f"puts before each block; write {section.text},{section.titles}, or set "
                "train.ict.titles to ''"
            )

    def check_first_texts(self, train: TrainFields, corpus: Any, *, file: Path) -> None:
        """Refuse texts that are shorter than their titles: the keys are exchanged."""
        from tokamake.data.corpus.documents import Fields, texts
        from tokamake.data.readers import open_input

        section = objective_section(train)
        fields = Fields((section.text, section.titles))
        source = open_input(file, format=corpus.format)
        for block in islice(source.blocks(fields.read_keys), 1):
            of_texts, of_titles = (sum(map(len, each)) for each in texts(block, fields).columns)
            if of_titles > of_texts:
                raise UserError(
                    f"{file}: {section.titles} is longer than {section.text} in the first "
                    f"documents: set train.ict.text to the key of the long texts, and "
                    "train.ict.titles to the key of their titles"
                )

    def stack_lengths(self, train: TrainFields) -> list[int]:
        return [train.sequence_length, train.sequence_length]

    def labeled_share(self, train: TrainFields) -> float:  # noqa: ARG002
        """No token has logits."""
        return 0.0

    def sample_settings(self, train: TrainFields) -> dict[str, Any]:
        """Settings that decide the blocks and the queries."""
        section = objective_section(train)
        keys = ("titles", "text", "query_in_block_probability", "one_sentence_documents")
        return {
            "name": self.name,
            "target_tokens": train.sequence_length - self.num_special,
            **{key: getattr(section, key) for key in keys},
        }

    def indexed(self, train: TrainFields, tokenizer: Path | None) -> IndexedObjective:
        """Add the special tokens."""
        from tokamake.data.samples.sentence_masking import special_tokens
        from tokamake.data.tokenizers import open_tokenizer

        if tokenizer is None:
            raise UserError(f"--tokenizer: missing; objective {self.name} needs it")
        opened = open_tokenizer(tokenizer)
        tokens = special_tokens(opened, ("pad", "cls", "sep"), path=tokenizer)
        stated = {
            **self.sample_settings(train),
            "tokenizer": opened.fingerprint,
            "tokens": tokens,
        }
        return IndexedObjective(stated, None, opened)

    def companion_key(self, train: TrainFields) -> str:
        titles: str = objective_section(train).titles
        return titles

    def companions(self, stated: dict[str, Any], prefixes: list[str]) -> dict[str, list[str]]:
        """Names that the titles of each dataset may have; none if blocks have no titles."""
        from tokamake.train.objectives.ict.titles import title_names

        if not stated["titles"]:
            return {}
        return title_names(prefixes, text=stated["text"], titles=stated["titles"])

    def check_companion(self, prefix: Path, companion: Path) -> None:
        from tokamake.train.objectives.ict.titles import check_titles

        check_titles(prefix, companion)

    def make_indexer(self, settings: Any, **options: Any) -> Any:
        from tokamake.train.objectives.ict.blocks import BlockIndexer

        return BlockIndexer(settings, epochs_of=options["epochs_of"])

    def open_samples(self, folder: Path, **options: Any) -> Any:
        from tokamake.train.objectives.ict.samples import BlockSamples

        return BlockSamples(folder, **options)
