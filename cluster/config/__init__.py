"""Configuration: one definition of every setting, from which flags, environment, file and keywords derive."""

from cluster.config.args import BUNDLED_CHECKPOINT, EngineArgs
from cluster.config.serve_args import ServeArgs
from cluster.config.sources import Settings, load_settings
from cluster.config.values import SpeculativeConfig

__all__ = [
    "BUNDLED_CHECKPOINT",
    "EngineArgs",
    "ServeArgs",
    "Settings",
    "SpeculativeConfig",
    "load_settings",
]
