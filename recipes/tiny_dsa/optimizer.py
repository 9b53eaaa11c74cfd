"""The two optimizers: orthogonalised momentum for matrices, AdamW for everything else."""

import math
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

# Matrices that AdamW steps nevertheless: they map to or from single tokens, experts or keys.
ADAM_NAMES = ("embed_tokens", "lm_head", "mlp.gate.weight", "indexer")


def orthogonalise(matrices: Tensor) -> Tensor:
    """Five quintic Newton-Schulz steps towards the nearest semi-orthogonal matrices [..., m, n].

    Coefficients: Jordan et al., "Muon: An optimizer for hidden layers in neural networks".
    """
    X = matrices.to(torch.bfloat16)
    is_tall = X.shape[-2] > X.shape[-1]
    if is_tall:
        X = X.transpose(-1, -2)
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        A = X @ X.transpose(-1, -2)
        X = 3.4445 * X + (-4.7750 * A + 2.0315 * (A @ A)) @ X
    return X.transpose(-1, -2) if is_tall else X


class OrthogonalMomentum:
    """Nesterov momentum, then an orthogonalised step; matrices of one shape are stepped as one batch."""

    def __init__(
        self,
        params: Iterable[Parameter],
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        orthogonalise: Callable[[Tensor], Tensor] = orthogonalise,
    ) -> None:
        self.momentum, self.weight_decay = momentum, weight_decay
        self._orthogonalise = orthogonalise
        self._groups: dict[tuple[int, int], list[Parameter]] = {}
        for param in params:
            self._groups.setdefault(tuple(param.shape[-2:]), []).append(param)
        self._averages = {
            param: torch.zeros_like(param) for group in self._groups.values() for param in group
        }

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for (rows, columns), params in self._groups.items():
            grads = [param.grad for param in params]
            averages = [self._averages[param] for param in params]
            torch._foreach_lerp_(averages, grads, 1 - self.momentum)
            updates = torch._foreach_lerp(grads, averages, self.momentum)
            directions = self._orthogonalise(torch.cat([u.reshape(-1, rows, columns) for u in updates]))
            parts = directions.split([u.numel() // (rows * columns) for u in updates])
            # the root mean square of a step is then near 0.2, as AdamW's
            scale = 0.2 * math.sqrt(max(rows, columns))
            torch._foreach_mul_(params, 1 - learning_rate * self.weight_decay)
            torch._foreach_add_(
                params,
                [
                    part.reshape(param.shape).to(param.dtype)
                    for part, param in zip(parts, params, strict=True)
                ],
                alpha=-learning_rate * scale,
            )


class Optimizer:
    """Steps every parameter with the optimizer it belongs to."""

    def __init__(
        self,
        params: Mapping[str, Tensor],
        *,
        learning_rate: float,
        adam_only: bool,
        orthogonalise: Callable[[Tensor], Tensor] = orthogonalise,
    ) -> None:
        self.params = [param for param in params.values() if isinstance(param, Parameter)]
        matrices, others = [], []
        for name, param in params.items():
            if isinstance(param, Parameter):
                by_adam = adam_only or param.dim() == 1 or any(part in name for part in ADAM_NAMES)
                (others if by_adam else matrices).append(param)
        self._momentum = OrthogonalMomentum(matrices, orthogonalise=orthogonalise) if matrices else None
        self._adam = torch.optim.AdamW(
            [
                {"params": [param for param in others if param.dim() > 1], "weight_decay": 0.1},
                {"params": [param for param in others if param.dim() == 1], "weight_decay": 0.0},
            ],
            lr=learning_rate,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=others[0].is_cuda,
        )

    def step(self, learning_rate: float) -> None:
        if self._momentum is not None:
            self._momentum.step(learning_rate)
        else:
            torch.nn.utils.clip_grad_norm_(self.params, 1.0, foreach=True)
        for group in self._adam.param_groups:
            group["lr"] = learning_rate
        self._adam.step()
        self.clear_gradients()

    def clear_gradients(self) -> None:
        for param in self.params:
            param.grad = None
