"""One process that trains the whole model with plain PyTorch: what a contributor would get alone.

The loop is the referee of the parity tests (`plnode.workload.reference`): same microbatches, same clipping, same optimizer.
"""

from __future__ import annotations

import torch

from bench.pipeline.job import load_manifest
from bench.pipeline.trainer import answer_requests, first_line, say
from plnode.workload.lm import LanguageModel
from plnode.workload.reference import ReferenceTrainer


def main() -> None:
    given = first_line()
    torch.set_num_threads(given["threads"])
    trainer = ReferenceTrainer(LanguageModel(load_manifest(given["manifest"])))
    parameters = sum(p.numel() for p in trainer.model.parameters())
    say({"parameters": parameters, "threads": torch.get_num_threads()})
    answer_requests(lambda: trainer.train_step().loss)


if __name__ == "__main__":
    main()
