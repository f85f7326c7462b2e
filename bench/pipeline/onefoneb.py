"""PyTorch's own pipeline: `torch.distributed.pipelining`, schedule 1F1B, gloo over loopback, one process a stage.

The stages are ours (`StagePart`), cut in the same place, with the same weights and the same optimizer (clipping included); what
differs is who moves the microbatches: trusted ranks in lockstep, without encryption, without credit, without a way to lose one.
Shapes are given beforehand, so that no metadata travels; the loss is the sum over tokens divided by the step's tokens, as
everywhere here, so gradients are not scaled again (`scale_grads=False`).

Rank 0 holds the store at a port of the kernel's choice and says it; the others are told.
"""

from __future__ import annotations

import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from bench.pipeline.job import load_manifest
from bench.pipeline.trainer import answer_requests, first_line, say
from plnode.model import StagePart
from plnode.workload.lm import LanguageModel

PATIENCE = datetime.timedelta(seconds=120)


class _Stage(nn.Module):
    """A `StagePart` as the schedule wants it: one tensor in, one out; the loss is computed by the schedule."""

    def __init__(self, part: StagePart, ids_BL: Tensor) -> None:
        super().__init__()
        self.part = part
        self.embeds = part.embedding is not None
        self.ids_BL = ids_BL  # a stage without the embedding takes only the shape of them

    def forward(self, x: Tensor) -> Tensor:
        return self.part.logits(None, x) if self.embeds else self.part.logits(x, self.ids_BL)


def main() -> None:
    given = first_line()
    torch.set_num_threads(given["threads"])
    rank, world = given["rank"], given["world"]
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=PATIENCE)
        say({"port": store.port})
    else:
        store = TCPStore("127.0.0.1", given["port"], world, is_master=False, timeout=PATIENCE)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=PATIENCE)
    try:
        _train(LanguageModel(load_manifest(given["manifest"])), rank, world)
    finally:
        dist.destroy_process_group()


def _train(job: LanguageModel, rank: int, world: int) -> None:
    model, batch = job.model, job.manifest.batch
    part = job.build_stage(rank)
    optimizer = job.build_optimizer(part)
    ids_BL = torch.zeros(batch.sequences, model.seq_len, dtype=torch.int64)
    last = rank == world - 1
    x_BLD, logits_BLV = (  # they require gradients: that is how the schedule knows that gradients come back
        torch.zeros(batch.sequences, model.seq_len, width, dtype=model.compute_dtype, requires_grad=True)
        for width in (model.dim, model.vocab)
    )
    stage = PipelineStage(
        _Stage(part, ids_BL),
        rank,
        world,
        torch.device("cpu"),
        input_args=x_BLD if rank else ids_BL,
        output_args=logits_BLV if last else x_BLD,
    )

    def loss(logits_BLV: Tensor, targets_BL: Tensor) -> Tensor:
        flat = logits_BLV.flatten(0, 1).to(model.weight_dtype)
        return F.cross_entropy(flat, targets_BL.flatten(), reduction="sum") / job.tokens_per_step

    schedule = Schedule1F1B(stage, batch.microbatches, loss_fn=loss, scale_grads=False)
    number = 0

    def step() -> float | None:
        nonlocal number
        losses: list[Tensor] = []
        ids_BL1 = torch.cat([torch.from_numpy(job.train_ids(number, i)) for i in range(batch.microbatches)])
        if rank == 0:
            schedule.step(ids_BL1[:, :-1])
        elif last:
            schedule.step(target=ids_BL1[:, 1:], losses=losses, return_outputs=False)
        else:
            schedule.step()
        optimizer.step(number)
        number += 1
        return float(torch.stack(losses).sum()) if last else None

    say({"ready": True})
    answer_requests(step)


if __name__ == "__main__":
    main()
