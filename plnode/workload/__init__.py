"""What a run trains: the language model, the single-process referee, and samples of text."""

from plnode.workload.lm import JobError, LanguageModel
from plnode.workload.reference import ReferenceStep, ReferenceTrainer
from plnode.workload.text import sample

__all__ = ["JobError", "LanguageModel", "ReferenceStep", "ReferenceTrainer", "sample"]
