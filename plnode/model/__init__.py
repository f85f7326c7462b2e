"""The model: a decoder that can be built in slices, its cut into stages, its first weights."""

from plnode.model.config import ModelConfig, activation_bytes
from plnode.model.decoder import Output, StagePart
from plnode.model.split import StageSpan, explicit_split, plan_split

__all__ = ["ModelConfig", "Output", "StagePart", "StageSpan", "activation_bytes", "explicit_split", "plan_split"]
