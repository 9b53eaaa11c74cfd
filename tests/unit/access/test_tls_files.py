"""Certificates of a server: bad files end the start with their reason, and never a server that runs."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.access.tls import ServerTls, TlsFiles
from kernels_integration.errors import ConfigError
from tests.support.certificates import Authority

Broken = Callable[[Authority, Path], TlsFiles]


def files(cert: Path, key: Path, client_ca: Path | None = None) -> TlsFiles:
    return TlsFiles(cert=str(cert), key=str(key), client_ca=None if client_ca is None else str(client_ca))


def text(folder: Path, content: str) -> Path:
    path = folder / "text.pem"
    path.touch(mode=0o600)
    path.write_text(content)
    return path


BROKEN: dict[str, tuple[Broken, str]] = {
    "expired": (lambda a, f: files(*a.issue("old", days=(-9, -1))), "CN=old ended .* renew it"),
    "not yet": (lambda a, f: files(*a.issue("new", days=(1, 9))), "CN=new begins .*clock"),
    "another's key": (lambda a, f: files(a.issue("a")[0], a.issue("b")[1]), "not the key of .*CN=a"),
    "no certificate": (lambda a, f: files(text(f, "hello"), a.issue("a")[1]), "BEGIN CERTIFICATE"),
    "no key": (lambda a, f: files(a.issue("a")[0], text(f, "hello")), "no private key"),
    "key and certificate mixed up": (lambda a, f: files(*reversed(a.issue("a"))), "--tls-"),
    "missing": (lambda a, f: files(f / "none", a.issue("a")[1]), "No such file"),
    "expired authority": (
        lambda a, f: files(*a.issue("a"), a.issue("ca", days=(-9, -1))[0]),
        "--tls-client-ca .*ended",
    ),
}


@pytest.mark.parametrize(("broken", "words"), BROKEN.values(), ids=BROKEN)
def test_a_bad_file_is_told_at_the_start(tmp_path: Path, broken: Broken, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerTls(broken(Authority(tmp_path), tmp_path))


def test_a_key_that_others_can_read_is_refused(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).issue("a")
    key.chmod(0o644)
    with pytest.raises(ConfigError, match=r"--tls-key .* mode 0644"):
        ServerTls(files(cert, key))


def test_what_changes_to_the_worse_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    authority = Authority(tmp_path)
    tls = ServerTls(files(*authority.issue("a")))
    authority.issue("expired", days=(-9, -1), into="a")
    tls.reload()
    tls.reload()
    [record] = caplog.records
    assert record.levelno == logging.ERROR
    assert "CN=expired ended" in record.message
    authority.issue("fresh", into="a")
    caplog.set_level(logging.INFO)
    tls.reload()
    assert caplog.records[-1].message == "new certificates are in force"
