"""A checkpoint that is package data lies elsewhere on each node: it travels by name."""

import dataclasses
from importlib.util import find_spec
from pathlib import Path

from actors.config import GroupConfig

_PREFIX = "package:"


def to_portable(config: GroupConfig, package: str) -> GroupConfig:
    """The config with an absolute model path, or with package:NAME/... where it is data of `package`."""
    path = Path(config.model_path).absolute()
    root = _package_root(package)
    if path.is_relative_to(root):
        return dataclasses.replace(config, model_path=f"{_PREFIX}{package}/{path.relative_to(root)}")
    return dataclasses.replace(config, model_path=str(path))


def to_local(config: GroupConfig) -> GroupConfig:
    """The inverse, on the node that reads the checkpoint."""
    if not config.model_path.startswith(_PREFIX):
        return config
    package, _, relative = config.model_path.removeprefix(_PREFIX).partition("/")
    return dataclasses.replace(config, model_path=str(_package_root(package) / relative))


def _package_root(package: str) -> Path:
    spec = find_spec(package)
    assert spec is not None, f"package {package} is part of latentray"
    assert spec.origin is not None, f"package {package} has an __init__.py"
    return Path(spec.origin).parent
