"""The file of API keys: whose each key is, and what its tenant may use.

    keys:
      - tenant: search
        sha256: 5e884898da28047151d0e56f8dc6292773603d0d6aabbdd62a11ef721d1542d8  # of the key
        max-requests: 64           # at the same time, at each gateway
      - tenant: team-b
        key: sk-...                # 16 characters at least
        operator: true             # may also drain and restart groups

A tenant may have several keys, so that one can be replaced without a gap.
"""

import hashlib
import hmac
import logging
from collections.abc import Mapping
from typing import Annotated, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictStr, ValidationError, model_validator

from cluster.access.principal import Principal
from cluster.access.secret_file import read_secret, version_of
from kernels_integration.errors import ConfigError, InvalidApiKeyError

logger = logging.getLogger(__name__)

FLAG = "--api-keys"
MIN_KEY_CHARACTERS = 16
RELOAD_S = 1.0
"""A changed file is read this late."""
_BEARER = "bearer "


class _Key(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tenant: Annotated[StrictStr, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
    key: Annotated[StrictStr, Field(pattern=r"^[!-~]+$", min_length=MIN_KEY_CHARACTERS)] | None = None
    sha256: Annotated[StrictStr, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    operator: Annotated[bool, Field(strict=True)] = False
    max_requests: Annotated[int | None, Field(alias="max-requests", ge=1, strict=True)] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.key is None) == (self.sha256 is None):
            raise ValueError("give either key or sha256")
        return self

    @property
    def digest(self) -> bytes:
        return _digest(self.key or "") if self.sha256 is None else bytes.fromhex(self.sha256)


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    keys: Annotated[tuple[_Key, ...], Field(min_length=1)]


def read_api_keys(path: str) -> Mapping[bytes, Principal]:
    """Principals by the SHA-256 of their keys. Errors: ConfigError, which never shows a key."""
    data = read_secret(path, FLAG)
    try:
        content = yaml.safe_load(data)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise ConfigError(f"{FLAG} {path} is no YAML{where}; {_EXPECTED}") from None
    try:
        file = _File.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "the file"
        raise ConfigError(f"{FLAG} {path}: {place}: {first['msg']}; {_EXPECTED}") from None
    principals: dict[bytes, Principal] = {}
    limits: dict[str, int | None] = {}
    for number, key in enumerate(file.keys):
        if key.digest in principals:
            raise ConfigError(f"{FLAG} {path}: keys.{number} is there twice; give each key once")
        if limits.setdefault(key.tenant, key.max_requests) != key.max_requests:
            raise ConfigError(
                f"{FLAG} {path}: keys.{number} has another max-requests than tenant {key.tenant} has above; "
                "a tenant has one limit for all of its keys"
            )
        principals[key.digest] = Principal(
            key.tenant, is_operator=key.operator, max_requests=key.max_requests
        )
    return principals


_EXPECTED = (
    "it must hold a list `keys` of entries with tenant (letters, digits, ._-), key (printable ASCII, at "
    f"least {MIN_KEY_CHARACTERS} characters) or sha256 (64 hexadecimal digits), optionally max-requests and "
    "operator"
)


class ApiKeys:
    """The keys of a file, as of its last good version. `reload` is called every RELOAD_S."""

    def __init__(self, path: str) -> None:
        """Errors: ConfigError."""
        self._path = path
        self._version = version_of(path)
        self._principals = read_api_keys(path)
        self._num_refused = 0

    def reload(self) -> None:
        """Read the file if it has changed. One that cannot be used is logged, and the old keys hold."""
        version = version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._principals = read_api_keys(self._path)
        except ConfigError as error:
            logger.error("the API keys from before stay in force: %s", error)
        else:
            tenants = {principal.tenant for principal in self._principals.values()}
            logger.info("%d API keys of %d tenants are in force", len(self._principals), len(tenants))

    def principal_of(self, authorization: str | None) -> Principal:
        """Whose call it is, by its `authorization`.

        Errors: InvalidApiKeyError. The time that it takes tells nothing of how much of a key is right.
        """
        found = None
        given = authorization or ""
        if given[: len(_BEARER)].lower() == _BEARER:
            digest = _digest(given[len(_BEARER) :].strip())
            for known, principal in self._principals.items():
                if hmac.compare_digest(known, digest):
                    found = principal
        if found is None:
            told = "is not valid here" if given else "is missing"
            raise InvalidApiKeyError(
                f"the API key {told}; send one that this server knows as `Authorization: Bearer KEY`"
            )
        return found

    def note_refusal(self, asked_by: str) -> None:
        """Of a call; logged the 1st, 2nd, 4th... time: a flood must not fill the log."""
        self._num_refused += 1
        if self._num_refused & (self._num_refused - 1) == 0:
            logger.warning("a call of %s had no valid API key (%d so far)", asked_by, self._num_refused)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
