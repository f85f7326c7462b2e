"""Muon: the orthogonal factor against the SVD, the update against torch's with the same iteration."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import _muon

from plnode.optim import Muon, orthogonalise


def matrix(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(rows, columns, dtype=dtype, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(32, 32), (24, 64), (64, 24), (1, 16), (128, 128)])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_singular_values_end_in_the_band_and_vectors_stay(shape: tuple[int, int], scale: float) -> None:
    m = matrix(*shape)
    u, s, vh = torch.linalg.svd(m, full_matrices=False)
    s = s.clamp(min=0.02 * float(torch.linalg.matrix_norm(m)))  # the promise is for singular values above 1 % of the norm
    found = orthogonalise(scale * (u * s @ vh))
    turned = u.T @ found @ vh.T  # diagonal, if the singular vectors are the same
    values = turned.diagonal()
    assert float(values.min()) > 0.68
    assert float(values.max()) < 1.14
    torch.testing.assert_close(turned, torch.diag(values), rtol=0, atol=1e-10)


def test_without_the_iteration_singular_values_are_not_in_the_band() -> None:
    """Control: normalising alone leaves them spread."""
    m = matrix(32, 32)
    assert float(torch.linalg.svdvals(m / torch.linalg.matrix_norm(m)).max()) < 0.5


def test_it_commutes_with_an_orthogonal_change_of_basis_in_the_precision_of_the_weights() -> None:
    basis = torch.linalg.qr(matrix(24, 24, 1)).Q
    m = matrix(24, 40)
    fine = orthogonalise(basis @ m) - basis @ orthogonalise(m)
    assert float(fine.abs().max()) < 1e-12
    single = orthogonalise((basis @ m).float()) - basis.float() @ orthogonalise(m.float())
    assert float(single.abs().max()) < 1e-4
    coarse = _muon._zeropower_via_newtonschulz(basis @ m, (3.4445, -4.7750, 2.0315), 5, 1e-7).double()
    control = coarse - basis @ _muon._zeropower_via_newtonschulz(m, (3.4445, -4.7750, 2.0315), 5, 1e-7).double()
    assert float(control.abs().max()) > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_dtype_is_kept_and_zero_stays_zero(dtype: torch.dtype) -> None:
    assert orthogonalise(matrix(4, 6).to(dtype)).dtype == dtype
    assert torch.equal(orthogonalise(torch.zeros(4, 6, dtype=dtype)), torch.zeros(4, 6, dtype=dtype))


@pytest.mark.parametrize("shape", [(16, 16), (24, 8), (8, 24)])
def test_updates_equal_those_of_torch_with_the_iteration_swapped(shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", lambda grad, *_: orthogonalise(grad))
    ours, theirs = nn.Parameter(matrix(*shape)), nn.Parameter(matrix(*shape))
    a = Muon([ours], lr=0.05, momentum=0.9, weight_decay=0.1)
    b = torch.optim.Muon([theirs], lr=0.05, momentum=0.9, weight_decay=0.1)
    for step in range(4):
        ours.grad, theirs.grad = matrix(*shape, step + 1), matrix(*shape, step + 1)
        a.step()
        b.step()
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_momentum_is_a_decaying_mean_with_a_look_ahead() -> None:
    parameter = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    optimizer = Muon([parameter], lr=1.0, momentum=0.75)
    g1, g2 = matrix(3, 3, 1), matrix(3, 3, 2)
    parameter.grad = g1
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), -orthogonalise(g1))
    before = parameter.detach().clone()
    parameter.grad = g2
    optimizer.step()
    mean = 0.75 * 0.25 * g1 + 0.25 * g2
    torch.testing.assert_close(optimizer.state[parameter]["momentum_buffer"], mean)
    torch.testing.assert_close(parameter.detach() - before, -orthogonalise(0.25 * g2 + 0.75 * mean))


def test_vectors_are_refused() -> None:
    with pytest.raises(ValueError, match=r"not for shape \(5,\)"):
        Muon([nn.Parameter(torch.zeros(5))], lr=0.1)
