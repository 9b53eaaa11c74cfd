"""What one layer's plan and attention cost on one CPU thread, beside torch's own fused attention.

Run: OMP_NUM_THREADS=1 python -m benchmarks.plan_and_attention
"""

import torch
import torch.nn.functional as F

from benchmarks.harness import best_us, machine
from kernels_integration.kv_formats import StoredVectors
from kernels_integration.plan import plan_from_indptr
from kernels_integration.reference import attention

HEADS, LATENT, ROPE, TOPK, SLOTS = 8, 128, 32, 64, 8192


def row_of_results(rows: int) -> list[float]:
    kv_indptr = torch.arange(rows + 1, dtype=torch.int32) * TOPK
    kv_indices = torch.randint(SLOTS, (rows * TOPK,))
    values, q = torch.randn(SLOTS, LATENT + ROPE), torch.randn(rows, HEADS, LATENT + ROPE)
    kv = StoredVectors.plain(values)
    o, lse = torch.empty(rows, HEADS, LATENT), torch.empty(rows, HEADS)
    plan = plan_from_indptr(kv_indptr, 1, kv_indices=kv_indices)

    def fused() -> torch.Tensor:
        keys = values.index_select(0, kv_indices).view(rows, 1, TOPK, LATENT + ROPE)
        return F.scaled_dot_product_attention(q.unsqueeze(1), keys, keys, scale=0.1)

    calls = max(5, 4096 // rows)
    plan_us = best_us(lambda: plan_from_indptr(kv_indptr, 1), calls=500)
    parts_us = best_us(lambda: plan_from_indptr(kv_indptr, 4), calls=100)
    run_us = best_us(lambda: attention.run(plan, q, kv, o, lse, sm_scale=0.1), calls=calls)
    fused_us = best_us(fused, calls=calls)
    return [plan_us, parts_us, run_us, fused_us, run_us / fused_us, plan_us / run_us]


def main() -> None:
    torch.set_num_threads(1)
    print(machine())
    print(f"{TOPK} KV tokens a row, {HEADS} heads, {LATENT} + {ROPE} wide, float32, one thread; microseconds")
    names = ("plan", "4 parts", "run", "fused", "run/fused", "plan/run")
    print(" rows", *(f"{name:>9}" for name in names))
    for rows in (4, 32, 128, 2048):
        print(f"{rows:5}", *(f"{result:9.2f}" for result in row_of_results(rows)))


if __name__ == "__main__":
    main()
