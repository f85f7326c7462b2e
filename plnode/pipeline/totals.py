"""What a node has done since it started, over all its generations: bytes over each boundary, tokens, graphs kept or computed again.

A generation and its runner count from zero; when they end their figures are kept here, so that what a person sees only grows.
"""

from __future__ import annotations

from dataclasses import replace

from plnode.pipeline.generation import Generation
from plnode.stage.jobs import Counters
from plnode.stage.runner import StageRunner


class Totals:
    """`tokens_per_microbatch` turns microbatches into tokens."""

    def __init__(self, tokens_per_microbatch: int) -> None:
        self._tokens_per_microbatch = tokens_per_microbatch
        self._sent: dict[str, tuple[int, int]] = {}
        self._microbatches = 0
        self._counters = Counters()
        self._now: tuple[int, Generation, StageRunner] | None = None

    def begin(self, stage: int, generation: Generation, runner: StageRunner) -> None:
        """A generation starts at `stage`."""
        self._now = (stage, generation, runner)

    def end(self) -> None:
        """It is over: keep its figures.  Gauges of the device become 0 with it."""
        self._sent, self._microbatches = self.sent(), self.microbatches
        counters = self.counters
        self._counters = Counters(graphs_kept=counters.graphs_kept, graphs_recomputed=counters.graphs_recomputed)
        self._now = None

    def sent(self) -> dict[str, tuple[int, int]]:
        """By boundary ("0-1"): payload bytes that this node sent forward and backward over it."""
        total = dict(self._sent)
        if self._now is not None:
            stage, generation, _ = self._now
            flow = generation.flow
            for name, forward, backward in (
                (f"{stage - 1}-{stage}", 0, flow.sent_backward_bytes),
                (f"{stage}-{stage + 1}", flow.sent_forward_bytes, 0),
            ):
                if forward or backward:
                    before = total.get(name, (0, 0))
                    total[name] = (before[0] + forward, before[1] + backward)
        return total

    @property
    def microbatches(self) -> int:
        """Training microbatches of applied steps."""
        return self._microbatches + (self._now[1].ledger.counts.done if self._now is not None else 0)

    @property
    def tokens(self) -> int:
        return self.microbatches * self._tokens_per_microbatch

    @property
    def counters(self) -> Counters:
        """The device's gauges of now, and totals of what was kept and recomputed."""
        if self._now is None:
            return self._counters
        now, before = self._now[2].counters, self._counters
        return replace(
            now,
            graphs_kept=before.graphs_kept + now.graphs_kept,
            graphs_recomputed=before.graphs_recomputed + now.graphs_recomputed,
        )
