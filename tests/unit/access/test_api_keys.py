"""The file of API keys: what is legal, whose a key is, and what a change of the file does."""

import hashlib
import logging
import os
from pathlib import Path

import pytest

from cluster.access.api_keys import ApiKeys, read_api_keys
from cluster.access.principal import Principal
from kernels_integration.errors import ConfigError, InvalidApiKeyError

KEY_A, KEY_B = "sk-aaaaaaaaaaaaaaaa", "sk-bbbbbbbbbbbbbbbb"
HASHED = hashlib.sha256(KEY_B.encode()).hexdigest()
TWO_TENANTS = f"""
keys:
  - tenant: a
    key: {KEY_A}
    max-requests: 2
  - {{tenant: b, sha256: {HASHED}, operator: true}}
"""


def write(path: Path, text: str, mode: int = 0o600) -> str:
    """In place of what was there, as editors and Kubernetes do it."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(mode)
    os.replace(new, path)
    return str(path)


def test_a_key_is_its_tenants_plain_or_hashed(tmp_path: Path) -> None:
    keys = ApiKeys(write(tmp_path / "keys", TWO_TENANTS))
    assert keys.principal_of(f"Bearer {KEY_A}") == Principal("a", is_operator=False, max_requests=2)
    assert keys.principal_of(f"bearer {KEY_B}") == Principal("b", is_operator=True)


@pytest.mark.parametrize(
    "given",
    [
        None,
        "",
        KEY_A,
        "Bearer",
        "Bearer ",
        f"Basic {KEY_A}",
        f"Bearer {KEY_A}x",
        f"Bearer {KEY_A[:-1]}",
        f"Bearer {HASHED}",  # who reads the file has no key
        "Bearer \udcff\x00ü",
    ],
)
def test_anything_else_is_nobodys(tmp_path: Path, given: str | None) -> None:
    keys = ApiKeys(write(tmp_path / "keys", TWO_TENANTS))
    with pytest.raises(InvalidApiKeyError, match="Authorization: Bearer KEY") as told:
        keys.principal_of(given)
    assert KEY_A not in str(told.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("keys: [", "is no YAML"),
        ("", "the file"),
        ("keys: []", "keys: "),
        ("- tenant: a", "the file"),
        ("keys: [{tenant: a}]", "keys.0: .*either key or sha256"),
        (f"keys: [{{tenant: a, key: {KEY_A}, sha256: {HASHED}}}]", "either key or sha256"),
        (f"keys: [{{key: {KEY_A}}}]", "keys.0.tenant"),
        (f"keys: [{{tenant: 'a b', key: {KEY_A}}}]", "keys.0.tenant"),
        ("keys: [{tenant: a, key: short}]", "keys.0.key"),
        ("keys: [{tenant: a, sha256: abc}]", "keys.0.sha256"),
        (f"keys: [{{tenant: a, key: {KEY_A}, max-requests: 0}}]", "keys.0.max-requests"),
        (f"keys: [{{tenant: a, key: {KEY_A}, max_requests: 1}}]", "keys.0.max_requests"),
        (f"keys: [{{tenant: a, key: {KEY_A}}}, {{tenant: b, key: {KEY_A}}}]", "keys.1 is there twice"),
        (
            f"keys: [{{tenant: a, key: {KEY_A}, max-requests: 1}}, {{tenant: a, key: {KEY_B}}}]",
            "keys.1 has another max-requests",
        ),
    ],
)
def test_a_broken_file_is_refused_without_showing_a_key(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as told:
        read_api_keys(write(tmp_path / "keys", text))
    assert "sk-" not in str(told.value)
    assert "short" not in str(told.value).replace("shorter", "")


def test_the_example_of_the_page_is_legal(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs" / "security.md").read_text()
    example = page.partition("```yaml\n")[2].partition("```")[0]
    keys = ApiKeys(write(tmp_path / "keys", example))
    assert keys.principal_of("Bearer password") == Principal("search", is_operator=False, max_requests=64)
    assert keys.principal_of("Bearer sk-0123456789abcdef") == Principal("ops", is_operator=True)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604, 0o666])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match=f"mode {mode:04o}.*chmod 600"):
        read_api_keys(write(tmp_path / "keys", TWO_TENANTS, mode))


def test_a_fifo_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo", 0o600)
    with pytest.raises(ConfigError, match="is no file"):
        read_api_keys(str(tmp_path / "fifo"))


@pytest.mark.parametrize(("path", "words"), [("missing", "No such file"), (".", "cannot be read|is no file")])
def test_what_is_no_file_is_refused(tmp_path: Path, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_api_keys(str(tmp_path / path))


def test_a_changed_file_is_in_force_and_a_broken_one_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "keys"
    keys = ApiKeys(write(path, TWO_TENANTS))
    write(path, f"keys: [{{tenant: c, key: {KEY_B}}}]")
    keys.reload()
    assert keys.principal_of(f"Bearer {KEY_B}").tenant == "c"
    with pytest.raises(InvalidApiKeyError):
        keys.principal_of(f"Bearer {KEY_A}")
    for broken in (lambda: write(path, "keys: ["), lambda: path.chmod(0o644), path.unlink):
        broken()
        caplog.clear()
        keys.reload()
        keys.reload()
        assert keys.principal_of(f"Bearer {KEY_B}").tenant == "c"
        assert [record.levelno for record in caplog.records] == [logging.ERROR], "told once a change"
    write(path, TWO_TENANTS)
    keys.reload()
    assert keys.principal_of(f"Bearer {KEY_A}").tenant == "a"
