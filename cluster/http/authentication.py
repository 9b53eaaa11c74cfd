"""Requests without a valid API key are answered with 401 before their body is read."""

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from cluster.access.api_keys import ApiKeys
from cluster.access.principal import ANYBODY, set_principal
from kernels_integration.errors import InvalidApiKeyError

_OPEN = ("/health", "/ready", "/status")
"""What probes ask, which have no key; and a page without data, which asks its reader for one."""


def require_key(keys: ApiKeys | None) -> Middleware:
    """Inside of what makes answers of errors. Handlers find who asks by `current_principal`.

    keys: None: everybody may ask.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        principal = ANYBODY  # a connection's requests run in one task: none may inherit another's
        if keys is not None and request.path not in _OPEN:
            try:
                principal = keys.principal_of(request.headers.get("Authorization"))
            except InvalidApiKeyError:
                keys.note_refusal(str(request.remote))
                raise
        set_principal(principal)
        return await handler(request)

    return middleware
