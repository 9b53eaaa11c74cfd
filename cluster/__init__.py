"""What people touch: configuration, launch, gateway, tokenizer, batch, jobs, client, CLI.

`from cluster import LLM, SamplingParams` is the Python interface. Names are imported on first use,
so that `cluster.client` needs neither torch nor ray.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from actors.sampling_params import SamplingParams
    from cluster.llm import LLM
    from cluster.outputs import CompletionOutput, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams"]

_HOMES = {
    "LLM": "cluster.llm",
    "SamplingParams": "actors.sampling_params",
    "RequestOutput": "cluster.outputs",
    "CompletionOutput": "cluster.outputs",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cluster' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
