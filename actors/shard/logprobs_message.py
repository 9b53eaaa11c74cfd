"""Log probabilities as a report carries them."""

import numpy as np

from actors.messages import TokenLogprobs
from actors.shard.boundary import Boundary
from kernels_integration.logprobs import Logprobs


def logprobs_message(logprobs: Logprobs | None, boundary: Boundary) -> TokenLogprobs | None:
    if logprobs is None:
        return None
    return TokenLogprobs(
        sampled=boundary.down(logprobs.sampled).astype(np.float32),
        top_ids=boundary.down(logprobs.top_ids).astype(np.int32).reshape(-1),
        top_values=boundary.down(logprobs.top_values).astype(np.float32).reshape(-1),
        num_top=logprobs.top_ids.shape[1],
    )
