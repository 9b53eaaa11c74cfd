"""Where tests compute."""

import torch

from actors.shard.boundary import Boundary

ON_CPU = Boundary(torch.device("cpu"))
