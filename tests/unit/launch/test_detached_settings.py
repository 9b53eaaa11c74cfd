"""Settings of a detached deployment on their way to another process."""

import typing
from pathlib import Path

import pytest

from cluster.config import ServeArgs
from cluster.config.values import FilePath
from cluster.launch import detached
from kernels_integration.errors import ConfigError


def test_every_path_of_the_settings_is_absolute_there() -> None:
    marker = typing.get_args(FilePath)[1]

    def is_path_type(hint: object) -> bool:
        return hint is marker or any(map(is_path_type, typing.get_args(hint)))

    hints = typing.get_type_hints(ServeArgs, include_extras=True)
    is_path = {name for name, hint in hints.items() if is_path_type(hint)}
    assert {"model", "chat_template", "log_dir"} <= is_path
    assert is_path <= set(detached._PATHS)
    args = ServeArgs(model="some/model", log_dir="logs")
    there = detached._as_there(args)
    assert (there.model, there.log_dir) == (str(Path("some/model").absolute()), str(Path("logs").absolute()))
    assert there.address == "auto"


def test_the_bundled_model_is_the_one_of_the_package_there() -> None:
    assert detached._as_there(ServeArgs()).model == detached._BUNDLED


@pytest.mark.parametrize("address", [None, "local"])
def test_a_local_ray_cannot_outlive_the_command(address: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ConfigError, match="ray start --head"):
        detached.require_cluster(address)
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    if address is None:
        assert detached.require_cluster(address) == "10.0.0.1:6379"
