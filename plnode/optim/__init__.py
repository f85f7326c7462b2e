"""Optimizers: AdamW and Muon, driven a stage at a time by one schedule."""

from plnode.optim.config import OptimConfig
from plnode.optim.muon import Muon, orthogonalise
from plnode.optim.schedule import lr_ratio
from plnode.optim.stage_optimizer import StageOptimizer

__all__ = ["Muon", "OptimConfig", "StageOptimizer", "lr_ratio", "orthogonalise"]
