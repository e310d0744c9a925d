"""Vectors of texts by a tower of a biencoder or by a BERT. Ranks have the whole model, share texts.

Texts of similar length share a batch. Batches do not depend on the number of ranks. So vectors do
not either, if ranks have the same number of threads, which decides how sums are rounded. Shape
suffixes: B texts, L tokens, D width of the vectors.
"""

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import groupby, islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from tokamake import files
from tokamake.checkpoint import model_tensors
from tokamake.checkpoint.detect import open_any
from tokamake.checkpoint.load_model import (
    sequence_length_of,
    tokenizer_of,
    tokenizer_of_run,
    verify,
)
from tokamake.checkpoint.tensors.checkpoint import Checkpoint
from tokamake.data.samples.sentence_masking import special_tokens
from tokamake.data.tokenizers import Tokenizer, open_tokenizer
from tokamake.errors import UserError
from tokamake.inference.layout import Peers, peers
from tokamake.models.biencoder.hf import vector_width
from tokamake.retrieval.embedding_options import EmbeddingOptions
from tokamake.retrieval.embeddings import is_embedded, new_shard
from tokamake.retrieval.products import check_name
from tokamake.runtime.console import counted
from tokamake.train.objectives.ict.blocks import with_special_tokens

Side = Literal["query", "block", "chunk"]
"""Side of a pair that a tower embeds. Chunks are compared with chunks: their vectors have length 1,
and come from the tower of blocks, or from a BERT: the mean of its last states."""
EMBEDDERS = {"query": ("biencoder",), "block": ("biencoder",), "chunk": ("bert", "biencoder")}
"""Families that embed each side."""
NUM_SPECIAL = 3
"""[CLS], and [SEP] after title and text."""
_SHORTEST = NUM_SPECIAL + 2
"""Most tokens of a text are at least the special ones, one of the title and one of the text."""
_BATCHES = 64
"""Batches whose texts are sorted by length together."""


class TokenizedText(NamedTuple):
    """A text to embed."""

    id: int
    tokens: npt.NDArray[np.int64]
    """(L,) with special tokens."""
    window: int = 0
    """Texts of different windows share no batch."""


class TextTower:
    """A tower of a biencoder, or a BERT, on this rank's device.

    Attributes:
        dimension: D.
        digest: hash of the weights of the whole model, the same in any checkpoint format.
    """

    def __init__(self, checkpoint: Checkpoint, side: Side, *, peers: Peers) -> None:
        shape = checkpoint.architecture
        self._peers, ranks = peers, peers.ranks
        verify(checkpoint, rank=ranks.rank, world_size=ranks.world_size)
        names = sorted(model_tensors.shapes(shape))
        weights = {name: checkpoint.source.read(f"model.{name}").contiguous() for name in names}
        self.digest = _digest(weights)
        model: Any = model_tensors.to_model(shape, weights).float().to(peers.device).eval()
        self._is_bert, self._has_unit_length = shape.family == "bert", side == "chunk"
        self.dimension = shape.hidden_size
        if self._is_bert:
            self._tower = model
            return
        towers: dict[str, Any] = model.towers  # of queries and of blocks, or one of both
        self._tower = [*towers.values()][0 if side == "query" else -1]
        self.dimension = vector_width(shape)

    def vectors(
        self, texts: Iterable[TokenizedText], *, batch_size: int
    ) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.float32] | None]]:
        """Yield ids (n,) and vectors (n, D) in order; all ranks iterate, rank 0 has the vectors."""
        for window in _batched(texts, _BATCHES * batch_size):
            order = np.argsort([len(text.tokens) for text in window], kind="stable")
            batches = [order[i : i + batch_size] for i in range(0, len(order), batch_size)]
            ours = range(self._peers.ranks.rank, len(batches), self._peers.ranks.world_size)
            found = {number: self._embed([window[i] for i in batches[number]]) for number in ours}
            every = self._gathered(found)
            vectors = None
            if self._peers.is_first:
                vectors = np.empty((len(window), self.dimension), np.float32)
                for number, places in enumerate(batches):
                    vectors[places] = every[number]
            yield np.array([text.id for text in window]), vectors

    def _embed(self, texts: list[TokenizedText]) -> npt.NDArray[np.float32]:
        """(B, D) vectors."""
        lengths = np.array([len(text.tokens) for text in texts])
        tokens_BL = np.zeros((len(texts), lengths.max()), np.int64)
        is_text = np.arange(tokens_BL.shape[1]) < lengths[:, None]
        tokens_BL[is_text] = np.concatenate([text.tokens for text in texts])
        documents = None if is_text.all() else self._on_device((~is_text).astype(np.int64))
        with torch.inference_mode():
            if self._is_bert:
                found = self._mean_states(self._on_device(tokens_BL), documents, lengths=lengths)
            else:
                found = self._tower.embeddings(
                    self._on_device(tokens_BL), documents, text_numbers=None
                )
            if self._has_unit_length:
                found = F.normalize(found.float(), dim=1)
        vectors: npt.NDArray[np.float32] = found.float().cpu().numpy()
        return vectors

    def _mean_states(
        self, tokens_BL: Tensor, documents: Tensor | None, *, lengths: npt.NDArray[np.int64]
    ) -> Tensor:
        """(B, D) means of the last states of texts, without [CLS] and [SEP]."""
        states_BLD = self._tower.states(tokens_BL, None, document_ids=documents)
        places_L = np.arange(tokens_BL.shape[1])
        counts_BL = (places_L > 0) & (places_L < lengths[:, None] - 1)
        weights_BL = torch.from_numpy(counts_BL / counts_BL.sum(1, keepdims=True)).float()
        weights_BL = weights_BL.to(self._peers.device)
        return torch.einsum("bld,bl->bd", self._tower.norm(states_BLD).float(), weights_BL)

    def _on_device(self, array: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array).to(self._peers.device)

    def _gathered(self, found: dict[int, Any]) -> dict[int, Any]:
        if self._peers.ranks.world_size == 1:
            return found
        every: list[dict[int, Any]] = [{}] * self._peers.ranks.world_size
        dist.gather_object(found, every if self._peers.is_first else None)
        return {number: array for part in every for number, array in part.items()}


class Embedder:
    """Embeds texts to a shard of embeddings.

    Attributes:
        checkpoint: the biencoder.
        tokenizer: tokenizer of the model.
        tokens: special tokens: cls, sep.
        length: most tokens of a text.
    """

    def __init__(
        self,
        checkpoint: Path,
        side: Side,
        *,
        tokenizer: Path | None,
        options: EmbeddingOptions,
        peers: Peers,
        tokenizer_option: str = "--tokenizer",
    ) -> None:
        """Open the model.

        Args:
            checkpoint: folder of the model.
            side: side of a pair that it embeds.
            tokenizer: of the model; None: the one beside its weights, or of its run.
            options: how the model reads texts.
            peers: the other ranks.
            tokenizer_option: name of the option that gives the tokenizer, for messages.
        """
        if options.batch_size < 1:
            raise UserError(f"--batch-size: {options.batch_size}: give 1 or more")
        self.peers, self._batch_size = peers, options.batch_size
        with peers.together():
            self.checkpoint = opened = open_any(checkpoint)
            if (family := opened.architecture.family) not in EMBEDDERS[side]:
                bert = "a BERT, or " if "bert" in EMBEDDERS[side] else ""
                raise UserError(
                    f"{opened.path}: a model of family {family}; name {bert}a biencoder, which "
                    "objective ict trains"
                )
            self.tokenizer = tokenizer_of(opened, tokenizer, option=tokenizer_option)
            stated = tokenizer_of_run(opened)
            if tokenizer and stated:
                _check_same(tokenizer, self.tokenizer, stated=stated, option=tokenizer_option)
            path = tokenizer or opened.path
            self.tokens = special_tokens(self.tokenizer, ("cls", "sep"), path=path)
            self.length = sequence_length_of(opened, options.sequence_length)
            if self.length < _SHORTEST:
                raise UserError(
                    f"--sequence-length: {self.length}: too small for [CLS], a title, [SEP], a "
                    f"text and [SEP]; give {_SHORTEST} or more"
                )
            self._tower = TextTower(opened, side, peers=peers)

    def write(
        self,
        texts: Iterable[TokenizedText],
        *,
        manifest: Path,
        made_from: dict[str, Any],
        inputs: dict[str, Any] | None = None,
    ) -> None:
        """Embed texts; rank 0 writes the shard, unless it is complete.

        Args:
            texts: the texts; all ranks have the same.
            manifest: `FOLDER/NAME.json`.
            made_from: what the texts were made from, for the manifest.
            inputs: further facts that decide the shard.
        """
        facts = {**self.facts, **made_from}
        request = files.digest({"made_from": facts, "inputs": inputs or {}})
        if self._is_embedded(manifest, request=request):
            self.peers.ranks.print_once(f"{manifest}: already complete")
            return
        num_vectors, width = 0, self._tower.dimension
        together = self.peers.together
        with ExitStack() as stack:
            writer = None
            with together():
                if self.peers.is_first:
                    shard = new_shard(manifest, dimension=width, made_from=facts, request=request)
                    writer = stack.enter_context(shard)
            for ids, vectors in self._tower.vectors(texts, batch_size=self._batch_size):
                with together():
                    if writer is not None and vectors is not None:
                        writer.append(ids, vectors)
                num_vectors += len(ids)
            with together():
                stack.close()
        self.peers.ranks.print_once(
            f"{manifest}: {counted(num_vectors, 'vector')} of width {width}"
        )

    @property
    def facts(self) -> dict[str, Any]:
        """Facts of the model that decide vectors, for manifests."""
        return {
            "model": self._tower.digest,
            "sequence_length": self.length,
            "tokenizer": self.tokenizer.fingerprint,
        }

    def vectors_of(self, texts: Iterable[TokenizedText]) -> npt.NDArray[np.float32]:
        """(n, D) vectors of texts, on rank 0."""
        found = [
            vectors
            for _, vectors in self._tower.vectors(texts, batch_size=self._batch_size)
            if vectors is not None
        ]
        return np.concatenate([np.zeros((0, self._tower.dimension), np.float32), *found])

    def _is_embedded(self, manifest: Path, *, request: str) -> bool:
        """Whether the shard is complete, as rank 0 sees it."""
        found = [self.peers.is_first and is_embedded(manifest, request=request)]
        if self.peers.ranks.world_size > 1:
            dist.broadcast_object_list(found)
        return found[0]

    def tokenized(
        self, number: int, text: str, *, title: str | None = None, window: int = 0
    ) -> TokenizedText:
        """Tokens of a text with special ones, as the objective ict has them."""
        parts = [text] if title is None else [text, title]
        ids = [np.array(each) for each in self.tokenizer.encode_batch(parts)]
        longest = (self.length - NUM_SPECIAL) // 2
        title_ids = None if title is None else ids[1][:longest]
        framed = with_special_tokens(ids[0], title_ids, tokens=self.tokens, length=self.length)
        return TokenizedText(number, framed, window)


@contextmanager
def opened_embedder(
    checkpoint: Path,
    side: Side,
    *,
    tokenizer: Path | None,
    options: EmbeddingOptions,
    output: Path,
    tokenizer_option: str = "--tokenizer",
) -> Iterator[Embedder]:
    """Join the other ranks, if there are any, and open the model of a command that embeds."""
    check_name(output)
    with peers() as ranks:
        yield Embedder(
            checkpoint,
            side,
            tokenizer=tokenizer,
            options=options,
            peers=ranks,
            tokenizer_option=tokenizer_option,
        )


def _check_same(given: Path, tokenizer: Tokenizer, *, stated: Path, option: str) -> None:
    """Refuse another tokenizer than the one that the run.yaml of a checkpoint names."""
    if tokenizer.fingerprint != open_tokenizer(stated).fingerprint:
        raise UserError(
            f"{option}: {given}: another tokenizer than {stated}, with which the model was "
            "trained; leave the option out"
        )


def _digest(weights: dict[str, Tensor]) -> str:
    hashed = hashlib.sha256()
    for name, tensor in weights.items():
        hashed.update(f"{name} {tuple(tensor.shape)}\n".encode())
        hashed.update(tensor.float().numpy().tobytes())
    return hashed.hexdigest()


def _batched(texts: Iterable[TokenizedText], size: int) -> Iterator[list[TokenizedText]]:
    for _, window in groupby(texts, key=attrgetter("window")):
        while batch := list(islice(window, size)):
            yield batch
