"""`/status`: one page for people, without a file from elsewhere, and `/status.json`, which it reads."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from aiohttp import web

_HEADERS = {
    # Nothing but what is in the page runs, and it talks to this server alone.
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class StatusPage:
    """read: what `cluster.gateway.status_document` says."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._html = Path(__file__).with_name("status.html").read_text(encoding="utf-8")

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/status", self._page)
        router.add_get("/status.json", self._document)

    async def _page(self, http: web.Request) -> web.Response:
        return web.Response(text=self._html, content_type="text/html", headers=_HEADERS)

    async def _document(self, http: web.Request) -> web.Response:
        return web.json_response(self._read(), headers={"Cache-Control": "no-store"})
