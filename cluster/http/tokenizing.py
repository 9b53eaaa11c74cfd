"""/tokenize and /detokenize, as vLLM has them: the ids that a prompt or a chat would have, and back."""

import asyncio
from collections.abc import Collection
from typing import Any

from aiohttp import web

from cluster.frontend.front_end import ModelFrontend
from cluster.http.request_body import BodyReader
from cluster.openai.bodies import check_model, parse_body
from cluster.openai.chat_body import ChatBody
from kernels_integration.errors import InvalidRequestError, UnknownParameterError, shortened, shown

_SHARED = ("model", "add_special_tokens", "return_token_strs")
_OF_PROMPTS = (*_SHARED, "prompt")
_OF_CHATS = (
    *_SHARED,
    "messages",
    "tools",
    "add_generation_prompt",
    "continue_final_message",
    "chat_template_kwargs",
)


class Tokenizing:
    """Answers the two."""

    def __init__(self, *, frontend: ModelFrontend, bodies: BodyReader) -> None:
        self._frontend = frontend
        self._bodies = bodies

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_post("/tokenize", self._tokenize)
        router.add_post("/detokenize", self._detokenize)

    async def _tokenize(self, http: web.Request) -> web.Response:
        body = await self._bodies.json_object(http)
        check_model(body.get("model"), self._frontend)
        token_ids = await asyncio.to_thread(self._token_ids, body)
        texts = None
        if _switch(body, "return_token_strs", False):
            backend = self._frontend.tokenizer.backend
            texts = [backend.id_to_token(token_id) for token_id in token_ids]
        max_model_len = self._frontend.max_model_len
        answer = {"count": len(token_ids), "max_model_len": max_model_len, "tokens": token_ids}
        return web.json_response(answer | {"token_strs": texts})

    def _token_ids(self, body: dict[str, Any]) -> list[int]:
        """add_special_tokens: true for a prompt, and false for a chat, whose template writes its own."""
        if body.get("messages") is not None:
            _require_fields(body, _OF_CHATS)
            chat = parse_body("/v1/chat/completions", {k: v for k, v in body.items() if k not in _SHARED})
            assert isinstance(chat, ChatBody)
            with_special = _switch(body, "add_special_tokens", False)
            return chat.prompt_ids(self._frontend, add_special_tokens=with_special)
        _require_fields(body, _OF_PROMPTS)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            raise InvalidRequestError(
                f"prompt is {shown(prompt)}; it must be text, or give messages", field="prompt"
            )
        with_special = _switch(body, "add_special_tokens", True)
        return list(self._frontend.encode_prompt(prompt, add_special_tokens=with_special))

    async def _detokenize(self, http: web.Request) -> web.Response:
        body = await self._bodies.json_object(http)
        check_model(body.get("model"), self._frontend)
        _require_fields(body, ("model", "tokens"))
        return web.json_response({"prompt": await asyncio.to_thread(self._text, body.get("tokens"))})

    def _text(self, tokens: object) -> str:
        if not isinstance(tokens, list) or not tokens:
            raise InvalidRequestError(
                f"tokens is {shown(tokens)}; it must be a list of at least one token id", field="tokens"
            )
        self._frontend.require_token_ids(tokens, "tokens")
        return self._frontend.tokenizer.decode(tokens, skip_special_tokens=False)


def _switch(body: dict[str, Any], name: str, default: bool) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be true or false", field=name)
    return default if value is None else value


def _require_fields(body: dict[str, Any], legal: Collection[str]) -> None:
    for name in body:
        if name not in legal:
            raise UnknownParameterError(
                f"parameter {shown(name)} is unknown; there are {', '.join(sorted(legal))}",
                field=shortened(name),
            )
