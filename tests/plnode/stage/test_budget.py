"""The plan says what takes how much; the meter counts what autograd really saves."""

import gc
import weakref

import pytest
import torch
from torch import nn

from plnode.stage.budget import GraphBudget, GraphMeter, MemoryPlan, plan_for
from plnode.stage.errors import MemoryPlanError


def test_plan_at_the_edge():
    """MEM-2: at 50, 100 and 101 % of the budget; on the meta device, so nothing is allocated."""
    with torch.device("meta"):
        plan = plan_for(nn.Linear(1000, 1000, bias=False).parameters(), buffers_bytes=500)
    assert plan == MemoryPlan(
        weights_bytes=4_000_000, gradients_bytes=4_000_000, optimizer_bytes=8_000_000, buffers_bytes=500
    )
    needed = 16_000_500
    assert plan.graph_bytes(2 * needed) == needed
    assert plan.graph_bytes(needed + 7, one_graph_bytes=7) == 7
    with pytest.raises(MemoryPlanError) as refusal:
        plan.graph_bytes(needed, one_graph_bytes=7)
    text = str(refusal.value)
    assert "weights 4,000,000, gradients 4,000,000, optimizer 8,000,000, buffers 500, one microbatch 7" in text
    assert "allow 7 more" in text


def test_decisions():
    budget = GraphBudget(100)
    shape = (2, 9)
    assert budget.fits(shape) and budget.estimate(shape) is None and not budget.tight
    budget.measured(shape, 40)
    for _ in range(2):
        assert budget.fits(shape)
        budget.keep(40)
    assert not budget.fits(shape) and budget.tight
    assert budget.fits((1, 1))  # nothing measured: it runs with a graph once anyhow
    budget.drop(40)
    assert budget.fits(shape) and (budget.kept_graphs, budget.kept_bytes) == (1, 40)
    unlimited = GraphBudget(None)
    unlimited.measured(shape, 1 << 60)
    assert unlimited.fits(shape) and not unlimited.tight


def test_meter_counts_each_storage_once_and_parameters_not_at_all():
    linear = nn.Linear(8, 8, bias=False)
    x = torch.randn(4, 8, requires_grad=True)
    meter = GraphMeter(linear.parameters())
    with meter:
        y = linear(x)  # saves x (the weight is held anyway)
        z = y.tanh()  # saves z
        w = z * z  # saves z twice
    assert meter.graph_bytes == 2 * 4 * 8 * 4
    w.sum().backward()
    plain = torch.tanh(linear(x.detach().requires_grad_()))
    assert plain is not None and x.grad is not None


def test_meter_leaves_no_cycle():
    """A graph that was metered is freed by its last reference, not by the garbage collector."""
    gc.disable()
    try:
        with GraphMeter([]):
            y = torch.randn(4, requires_grad=True).exp()
        gone = weakref.ref(y)
        del y
        assert gone() is None
    finally:
        gc.enable()
