"""The stage runner: one device thread that owns a stage's weights, graphs and optimizer, and what it needs.

``open_runner`` is the way in.  Pure: ``policy`` (order of jobs), ``account`` (what the gradients hold).  On the device thread:
``work``, ``device``, ``boundary``, ``budget``.  Between them: ``thread``.  On the loop: ``runner``.
On disk: ``snapshots``, ``snapshot_file``.
"""

from .boundary import DenseBoundary, Direction, id_dtype_for
from .budget import MemoryPlan, plan_for
from .device import Inflow
from .errors import (
    AccountClosed,
    AlreadyCounted,
    BadPayload,
    MemoryPlanError,
    PoolExhausted,
    RunnerClosed,
    RunnerFailed,
    RunnerFull,
    SnapshotError,
    StageError,
    StageMemoryError,
    StaleStep,
    StepDiscarded,
    UnknownMicrobatch,
)
from .jobs import Backward, Counters, Exported, Forwarded, Microbatch, NonFinite, Ready, Stepped, Where
from .policy import BackwardFirst, Order
from .runner import StageRunner, open_runner

__all__ = [
    "AccountClosed",
    "AlreadyCounted",
    "Backward",
    "BackwardFirst",
    "BadPayload",
    "Counters",
    "DenseBoundary",
    "Direction",
    "Exported",
    "Forwarded",
    "Inflow",
    "MemoryPlan",
    "MemoryPlanError",
    "Microbatch",
    "NonFinite",
    "Order",
    "PoolExhausted",
    "Ready",
    "RunnerClosed",
    "RunnerFailed",
    "RunnerFull",
    "SnapshotError",
    "StageError",
    "StageMemoryError",
    "StageRunner",
    "StaleStep",
    "StepDiscarded",
    "Stepped",
    "UnknownMicrobatch",
    "Where",
    "id_dtype_for",
    "open_runner",
    "plan_for",
]
