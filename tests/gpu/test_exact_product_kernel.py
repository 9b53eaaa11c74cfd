"""A product of bfloat16 rows with a float32 matrix is as exact as one in float32."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernels need triton: pip install triton")

from kernels_integration.triton.exact_product import exact_parts
from tests.support.guarded import Guarded


# Triton's interpreter multiplies the bits of bfloat16.
@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "outputs", "width"), [(1, 5, 40), (17, 33, 300), (3, 64, 7168)])
def test_as_exact_as_float32(device, rows, outputs, width):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, width, generator=generator).bfloat16()
    weight = torch.randn(outputs, width, generator=generator)
    parts = exact_parts(Guarded.of(x, device).tensor, Guarded.of(weight, device).tensor)
    assert parts.isfinite().all()
    expected = x.double() @ weight.double().T
    of_terms = x.double().abs() @ weight.double().abs().T
    error = ((parts.sum(0).cpu().double() - expected).abs() / of_terms).max()
    assert error < 1e-6, "bfloat16 would be off by 1e-3"
