"""What a stage runner refuses, one class a reason.

Every class says what the caller can do about it.  ``BadPayload`` is the fault of the peer that sent the bytes; the others are a
matter between this node's rooms (a job that came too late, a full job set) or of this machine (memory).  Nothing here decides
what becomes of a microbatch: the pipeline does.
"""

from __future__ import annotations


class StageError(Exception):
    """Base of everything that the stage room raises on purpose."""


class BadPayload(StageError):
    """Bytes of a neighbour do not mean what they must (size, token ids).  The peer's fault: drop the payload, name the peer."""


class StaleStep(StageError):
    """The job belongs to a step that this stage has applied already.  Drop the job; nothing was changed."""


class StepDiscarded(StageError):
    """The job was queued when its step was discarded.  Nothing was changed; submit it anew if the step is tried again."""


class UnknownMicrobatch(StageError):
    """A gradient came for a microbatch whose forward is not held here (never ran, was forgotten, or its backward ran already)."""


class AccountClosed(StageError):
    """The gradients of this step cannot take another contribution or leave the node.

    Either they were replaced by the round's result (``import_gradients``), or an error in the middle of a backward left a part of
    a contribution in them.  ``discard`` the step and compute its microbatches again.
    """


class AlreadyCounted(StageError):
    """This microbatch is in the account of the open step already; nothing was added a second time."""


class RunnerFull(StageError):
    """The bounded job set has no room.  More microbatches were admitted than were planned for: a fault of the credits granted."""


class RunnerClosed(StageError):
    """The runner is closed or closing; the job did not run."""


class RunnerFailed(StageError):
    """The device thread ended by an error that is not a job's own.  ``__cause__`` holds it; the node must restart this part."""


class StageMemoryError(StageError):
    """The device or the host is out of memory.  The text says what was held and what to change."""


class MemoryPlanError(StageError):
    """The stage does not fit its memory.  The text lists what takes how much and what would fit; nothing was allocated for it."""


class PoolExhausted(StageError):
    """The fixed pool of host buffers has no room for another one.  Release a buffer, or plan fewer slots."""


class SnapshotError(StageError):
    """A snapshot on disk cannot be used; the text names the file and what is wrong with it."""
