"""The whole model out of the stages' snapshots, and what it writes.

A stage's snapshot holds its weights under their global names, so the stages' files together are the model; that is what
`weights = "open"` in the manifest allows anyone to do.  Every parameter must be there with its shape: a model with one stage's
weights left as they were drawn would still write something, only worse.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from plnode.model import StagePart
from plnode.workload import LanguageModel, sample

__all__ = ["AssemblyError", "assembled", "continuation", "newest_complete"]


# Below 1 a small model keeps to what it knows; at 0 it repeats itself.
TEMPERATURE = 0.7


class AssemblyError(Exception):
    """The stages' snapshots do not make a model; the text names the stage and the file."""


def newest_complete(snapshots: Mapping[int, Mapping[int, str]], stages: int) -> dict[int, Path]:
    """Stage -> file, of the newest step for which every stage has one.  Raises `AssemblyError` if there is none.

    `snapshots` is step -> stage -> path.
    """
    for step in sorted(snapshots, reverse=True):
        if len(snapshots[step]) == stages:
            return {stage: Path(path) for stage, path in sorted(snapshots[step].items())}
    raise AssemblyError("there is no step of which every stage has written a snapshot")


def assembled(job: LanguageModel, files: Mapping[int, Path]) -> list[StagePart]:
    """The stages in order with the weights of their files.  Raises `AssemblyError`."""
    return [_with_weights(job.build_stage(stage), stage, files[stage]) for stage in range(len(job.spans))]


def continuation(job: LanguageModel, snapshots: Mapping[int, Mapping[int, str]], prompt: str, tokens: int) -> str:
    """`prompt` continued by so many tokens of the newest complete model; the run's seed draws them.  Raises `AssemblyError`."""
    parts = assembled(job, newest_complete(snapshots, len(job.spans)))
    return sample(parts, job.tokenizer, prompt, tokens, temperature=TEMPERATURE, seed=job.manifest.seed)


def _with_weights(part: StagePart, stage: int, file: Path) -> StagePart:
    try:
        with safe_open(file, framework="pt") as stored, torch.no_grad():
            names = set(stored.keys())
            for name, parameter in part.named_parameters():
                if name not in names:
                    raise AssemblyError(f"stage {stage}: {file} does not hold {name}")
                tensor = stored.get_tensor(name)
                if tensor.shape != parameter.shape:
                    shapes = f"{tuple(tensor.shape)}, not {tuple(parameter.shape)}"
                    raise AssemblyError(f"stage {stage}: {name} in {file} has shape {shapes}")
                parameter.copy_(tensor)
    except (OSError, SafetensorError) as problem:
        raise AssemblyError(f"stage {stage}: {file} cannot be read: {problem}") from problem
    return part
