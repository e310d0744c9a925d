"""Settings and data of the objective span_corruption."""

from pathlib import Path
from typing import Any

from tokamake.config.data import TokenizerSettings
from tokamake.config.train_fields import TrainFields
from tokamake.errors import UserError
from tokamake.train.objectives._sentences import MaskingData, max_masked


class Data(MaskingData):
    """Samples of an encoder and a decoder."""

    stacks, megatron_program = "encoder_decoder", "pretrain_t5"
    # Megatron-LM leaves two places of the encoder free.
    name, max_ngram, num_special = "span_corruption", 10, 2
    unused = ("sentence_order",)

    def check_lengths(self, train: TrainFields, limit: int, *, source: str) -> None:
        """Check that the decoder sees whole samples."""
        _, length = self.stack_lengths(train)
        # Sequence parallelism pads the decoder to a multiple of its ranks.
        parallel = train.parallel
        multiple = parallel.tensor_parallel_size if parallel.sequence_parallel else 1
        if -(-length // multiple) * multiple > limit:
            raise UserError(
                f"train.masking.decoder_sequence_length: {length}: more than the {limit} "
                f"max_position_embeddings of {source}; lower it"
            )

    def stack_lengths(self, train: TrainFields) -> list[int]:
        masking = train.masking
        # The decoder's first token, and the worst case: each masked token is a span of its own.
        target = train.sequence_length - self.num_special
        longest = 1 + 2 * max_masked(masking.probability, target)
        return [train.sequence_length, masking.decoder_sequence_length or longest]

    def check_tokenizer(self, tokenizer: TokenizerSettings) -> None:
        """Refuse tokenizers without sentinels."""
        super().check_tokenizer(tokenizer)
        if not tokenizer.sentinels:
            raise UserError(
                "tokenizer.sentinels: 0: objective span_corruption replaces spans by sentinels; "
                "set it to 100, as T5 has"
            )

    def sample_settings(self, train: TrainFields) -> dict[str, Any]:
        length = {"decoder_sequence_length": self.stack_lengths(train)[1]}
        return super().sample_settings(train) | length

    def make_indexer(self, settings: Any, **options: Any) -> Any:
        from tokamake.train.objectives.span_corruption.decoder_lengths import SpanIndexer

        return SpanIndexer(settings, **options)

    def open_samples(self, folder: Path, **options: Any) -> Any:
        from tokamake.train.objectives.span_corruption.samples import SpanCorruptionSamples

        return SpanCorruptionSamples(folder, **options)
