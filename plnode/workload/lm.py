"""The language model as a job for the swarm: which stages there are, what they compute, which tokens they see.

The rest of the node knows a job only through this object: it builds a stage and its optimizer, says what crosses a boundary,
and draws the token ids of a microbatch.  Everything follows from the manifest, so all nodes of a run agree without talking.

A manifest pins hashes of the corpus and of the tokenizer; they are compared here, before anything is trained, because a node
with other data would learn from other text without any error.
"""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from plnode.data import Corpus, Sampler, Tokenizer, load_corpus, load_tokenizer, unigram_loss
from plnode.model import StagePart, StageSpan, explicit_split, plan_split
from plnode.optim import StageOptimizer
from plnode.stage.boundary import DenseBoundary, id_dtype_for
from wire.tensor import DType

if TYPE_CHECKING:
    from plnode.manifest import Manifest

Ids = npt.NDArray[np.int64]


class JobError(Exception):
    """The manifest asks for something that this installation does not have; `key` is the manifest's path."""

    def __init__(self, key: str, expected: str, got: str) -> None:
        super().__init__(f"{key}: this installation has {expected}, the manifest says {got}")
        self.key = key


class LanguageModel:
    """Built from a checked manifest: some 50 ms to load and verify the corpus; weights are drawn by `build_stage`.

    Raises JobError if corpus, tokenizer or vocabulary are not those of the manifest.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.model = manifest.model_config()
        self.optim = manifest.optim_config()
        stages = manifest.stages
        split = stages.split
        self.spans: tuple[StageSpan, ...] = (
            plan_split(self.model, stages.count) if split is None else explicit_split(self.model, split)
        )
        self.corpus: Corpus = load_corpus(manifest.data.corpus)
        for key, ours, theirs in (
            ("data.sha256", self.corpus.sha256, manifest.data.sha256),
            ("model.tokenizer", self.corpus.tokenizer_hash, manifest.model.tokenizer),
            ("model.vocab", str(self.corpus.vocabulary), str(self.model.vocab)),
        ):
            if ours != theirs:
                raise JobError(key, ours, theirs)
        batch = manifest.batch
        self.sampler = Sampler(self.corpus, manifest.seed, self.model.seq_len, batch.sequences, batch.microbatches)
        if manifest.evaluation.microbatches > self.sampler.heldout_microbatches:
            raise JobError(
                "evaluation.microbatches", f"at most {self.sampler.heldout_microbatches}", str(manifest.evaluation.microbatches)
            )

    @property
    def tokens_per_step(self) -> int:
        return self.manifest.batch.tokens

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.manifest.data.corpus)

    @cached_property
    def unigram_loss(self) -> float:
        """Held-out loss (nats a token) of word frequencies alone: what a run must beat."""
        return unigram_loss(self.corpus)

    def boundary(self) -> DenseBoundary:
        """What crosses from any stage to the next."""
        return DenseBoundary(
            batch=self.manifest.batch.sequences,
            seq_len=self.model.seq_len,
            dim=self.model.dim,
            dtype=DType[self.manifest.boundary.dtype],
            id_dtype=id_dtype_for(self.model.vocab),
            vocab=self.model.vocab,
        )

    def build_stage(self, stage: int) -> StagePart:
        """Stage `stage` with its first weights; the same bits on every node."""
        span = self.spans[stage]
        return StagePart(self.model, span.first_layer, span.end_layer, span.embed, span.head, self.manifest.seed)

    def build_whole(self) -> StagePart:
        """The model in one piece, with the same first weights."""
        return StagePart(self.model, 0, self.model.layers, True, True, self.manifest.seed)

    def build_optimizer(self, part: StagePart) -> StageOptimizer:
        """The optimizer of a stage made by `build_stage`."""
        return StageOptimizer(part.named_parameters(), self.optim, len(self.spans))

    def train_ids(self, step: int, index: int) -> Ids:
        """Token ids (sequences, seq_len + 1) of training microbatch (step, index)."""
        return self.sampler.train(step, index)

    def heldout_ids(self, index: int) -> Ids:
        """Token ids (sequences, seq_len + 1) of held-out microbatch `index`."""
        return self.sampler.heldout(index)
