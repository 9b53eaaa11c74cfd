"""Which addresses are served without keys and certificates, and which flags belong together."""

import pytest

from cluster.access.access import AccessFiles
from cluster.access.exposure import require_protected
from cluster.config import ServeArgs
from kernels_integration.errors import ConfigError

TLS = {"tls_cert": "c", "tls_key": "k"}
PUBLIC = ("0.0.0.0", "::", "10.0.0.1", "192.0.2.7")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_the_own_machine_is_served_without_anything(host: str) -> None:
    require_protected(ServeArgs(host=host))


@pytest.mark.parametrize("host", PUBLIC)
@pytest.mark.parametrize(
    ("given", "lacking"),
    [
        ({}, ["--tls-cert", "--api-keys"]),
        ({"api_keys": "f"}, ["--tls-cert"]),  # keys would travel in the clear
        (TLS, ["--api-keys"]),
    ],
)
def test_other_machines_are_not(host: str, given: dict[str, str], lacking: list[str]) -> None:
    with pytest.raises(ConfigError, match="--insecure") as told:
        require_protected(ServeArgs(host=host, **given))
    assert f"host {host} " in str(told.value)
    assert [flag for flag in ("--tls-cert", "--api-keys") if flag in str(told.value)] == lacking


@pytest.mark.parametrize("host", PUBLIC)
@pytest.mark.parametrize("given", [TLS | {"api_keys": "f"}, TLS | {"tls_client_ca": "f"}, {"insecure": True}])
def test_other_machines_are_served_where_calls_are_protected_or_it_is_said(
    host: str, given: dict[str, object]
) -> None:
    require_protected(ServeArgs(host=host, **given))


@pytest.mark.parametrize("given", [{"tls_cert": "c"}, {"tls_key": "k"}, {"tls_client_ca": "a"}])
def test_a_part_of_tls_is_refused(given: dict[str, str]) -> None:
    [flag] = (f"--{name.replace('_', '-')}" for name in given)
    with pytest.raises(ConfigError, match=f"^{flag} without"):
        AccessFiles.of(ServeArgs(**given))
