"""The same weights in GLM's dialect (`glm_moe_dsa`): identical outputs, other code path.

    python to_glm.py SRC DST

GLM's indexer rotates interleaved pairs where DeepSeek-V3.2's rotates halves; permuting the rotary rows of the
indexer's wq_b, wk and k_norm turns one into the other exactly.  Everything else is shared.
"""

import json
import os
import shutil
import sys

import torch
from safetensors.torch import load_file, save_file


def main(src, dst):
    os.makedirs(dst, exist_ok=True)
    c = json.load(open(src + "/config.json"))
    r, D, Hn = c["qk_rope_head_dim"], c["index_head_dim"], c["index_n_heads"]
    perm = torch.arange(D)
    perm[0:r:2], perm[1:r:2] = (
        torch.arange(r // 2),
        torch.arange(r // 2) + r // 2,
    )  # new row 2i <- i, 2i+1 <- i + r/2
    index = json.load(open(src + "/model.safetensors.index.json"))
    for f in sorted(set(index["weight_map"].values())):
        t = load_file(f"{src}/{f}")
        for k, v in t.items():
            if k.endswith("indexer.wq_b.weight"):
                t[k] = v.view(Hn, D, -1)[:, perm].reshape(v.shape).contiguous()
            elif ".indexer.wk." in k or ".indexer.k_norm." in k:
                t[k] = v[perm].contiguous()
        save_file(t, f"{dst}/{f}", metadata={"format": "pt"})
    c.update(
        architectures=["GlmMoeDsaForCausalLM"],
        model_type="glm_moe_dsa",
        indexer_types=["full"] * c["num_hidden_layers"],
        rope_parameters={"rope_theta": c.pop("rope_theta"), "rope_type": "default"},
    )
    c.pop("rope_scaling", None)
    json.dump(c, open(dst + "/config.json", "w"), indent=2)
    for f in (
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
        "model.safetensors.index.json",
    ):
        shutil.copy(f"{src}/{f}", f"{dst}/{f}")


if __name__ == "__main__":
    main(*sys.argv[1:3])
