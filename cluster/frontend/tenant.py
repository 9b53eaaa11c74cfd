"""Names of tenants, as requests state them."""

from kernels_integration.errors import InvalidRequestError, shown

TENANT_HEADER = "X-Tenant"
"""Of HTTP; gRPC's metadata has the same key in small letters."""
_MAX_TENANT = 128


def checked_tenant(name: str | bytes) -> str:
    """The name, "" where none is stated. Errors: InvalidRequestError."""
    if isinstance(name, str) and len(name) <= _MAX_TENANT and name.isascii() and (name.isprintable()):
        return name
    raise InvalidRequestError(
        f"{TENANT_HEADER} is {shown(name)}; it must be at most {_MAX_TENANT} printable ASCII characters",
        field=TENANT_HEADER.lower(),
    )
