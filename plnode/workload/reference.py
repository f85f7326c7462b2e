"""The referee: one process trains the same model on the same microbatches in a plain loop.

A swarm's result has to equal what a person would have got alone.  This loop says what that is, so it uses none of the swarm's
machinery: no pipeline, no runner, no stage optimizer.  The whole model is one module; torch's own AdamW (and Muon), torch's own
clipping.  What it shares with the swarm is the definition of the job: the decoder, the sampler, the schedule, and that
gradients are clipped for each stage by itself.

Each microbatch's loss is its sum over tokens divided by the tokens of the whole step, backward accumulates in index order; this
is the order of sums that a swarm of one replica a stage has, and then the results are equal to the bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from plnode.model import StagePart, StageSpan
from plnode.optim import Muon, lr_ratio
from plnode.workload.lm import LanguageModel


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """`loss` in nats a token over the step's set; one gradient norm (before clipping) a stage."""

    step: int
    loss: float
    grad_norms: tuple[float, ...]


def parameters_of(model: nn.Module, span: StageSpan) -> list[nn.Parameter]:
    """The parameters of the whole model that belong to a stage, in the order in which the stage itself has them."""

    def belongs(name: str) -> bool:
        room = name.split(".")
        if room[0] == "layers":
            return span.first_layer <= int(room[1]) < span.end_layer
        return span.embed if room[0] == "embedding" else span.head

    return [parameter for name, parameter in model.named_parameters() if belongs(name)]


class ReferenceTrainer:
    """Trains the whole model of a job.  `model` is the module, `step` the number of the next step."""

    def __init__(self, job: LanguageModel) -> None:
        self.job = job
        self.model = job.build_whole()
        self.step = 0
        self._stages = [parameters_of(self.model, span) for span in job.spans]
        config = job.optim
        hidden = {
            id(p) for n, p in self.model.named_parameters() if config.name == "muon" and p.ndim == 2 and n.startswith("layers.")
        }
        rest = [p for p in self.model.parameters() if id(p) not in hidden]
        adamw = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.ndim == 2], "weight_decay": config.weight_decay},
                {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        self._adamw = adamw
        matrices = [p for p in self.model.parameters() if id(p) in hidden]
        self._muon = Muon(matrices, config.muon_lr, config.muon_momentum, config.weight_decay)

    def train_step(self) -> ReferenceStep:
        """One optimizer step over all its microbatches.  Raises FloatingPointError for a loss or gradient that is not finite."""
        job, total = self.job, 0.0
        for index in range(job.manifest.batch.microbatches):
            ids = torch.from_numpy(job.train_ids(self.step, index))
            loss_sum = self.model(None, ids).loss_sum
            (loss_sum / job.tokens_per_step).backward()
            total += loss_sum.detach().item()
        norms = []
        clip = job.optim.clip / math.sqrt(len(self._stages))
        for parameters in self._stages:
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, clip)))
        if not all(map(math.isfinite, [total, *norms])):
            raise FloatingPointError(f"step {self.step}: loss {total}, gradient norms {norms}")
        ratio = lr_ratio(job.optim, self.step)
        for group in self._adamw.param_groups:
            group["lr"] = job.optim.lr * ratio
        self._muon.lr = job.optim.muon_lr * ratio
        self._adamw.step()
        self._muon.step()
        self.model.zero_grad()
        done = ReferenceStep(self.step, total / job.tokens_per_step, tuple(norms))
        self.step += 1
        return done

    def steps(self, count: int) -> Iterator[ReferenceStep]:
        """`count` steps, one at a time."""
        for _ in range(count):
            yield self.train_step()

    @torch.no_grad()
    def heldout_loss(self, microbatches: int | None = None) -> float:
        """Held-out loss in nats a token over the first `microbatches` (the manifest's number if None)."""
        count = self.job.manifest.evaluation.microbatches if microbatches is None else microbatches
        losses = [self.model(None, torch.from_numpy(self.job.heldout_ids(i))).loss_sum.item() for i in range(count)]
        return float(sum(losses)) / (count * self.job.sampler.sequences * self.job.model.seq_len)

    def weights(self) -> dict[str, torch.Tensor]:
        """The weights by name (live tensors): what the stages of a swarm hold together."""
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def parts(self) -> Sequence[StagePart]:
        """The model as a chain of one part, for sampling."""
        return [self.model]
