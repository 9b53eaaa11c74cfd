"""What stands before a model: text and chats become validated requests, updates become text."""

import random
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from actors.config import GroupConfig
from actors.coordinator.request_limit import require_prompt_fits
from actors.model.config import ModelConfig
from actors.model.model_folder import ModelFolder
from actors.parameter_kinds import is_text
from actors.requests import Request
from actors.sampling_params import (
    ALL_LOGPROBS,
    DEFAULT_MAX_LOGPROBS,
    TOKEN_ID_PARAMETERS,
    SamplingParams,
)
from cluster.chat.answer_form import AnswerForm, ReasoningParser, ToolCallParser, answer_form
from cluster.chat.messages import checked_messages, checked_tools, require_known_fields
from cluster.chat.open_end import left_open, until_open_end
from cluster.frontend.generation_config import default_sampling_params, eos_token_ids
from cluster.frontend.grammar_check import GrammarCheck
from cluster.frontend.limits import require_token_ids, with_fitting_length
from cluster.frontend.prompt_bound import longest_token
from cluster.frontend.token_checks import (
    bad_word_ids,
    require_candidates,
    require_end_of_text,
    require_text,
)
from cluster.tokenizer import TextStream, Tokenizer, TokenizerMode, load_tokenizer
from cluster.tokenizer.files import CONFIG
from kernels_integration.errors import ContextLengthError, InvalidRequestError, kind_of, shown

MAX_CACHE_SALT = 1024
"""Characters."""


class ModelFrontend:
    """One model's tokenizer, chat template, limits and defaults. Needs neither torch nor Ray.

    default_sampling_params: what generation_config.json says, in SamplingParams' names; nothing under
    --generation-config vllm. They apply where a front leaves a parameter open: OpenAI bodies, LLM without
    sampling_params, the command line. The gRPC wire has presence rules of its own.
    max_logprobs: alternatives a request may ask for beside each token; -1: any number.
    answer_form: how the model writes thoughts and calls of tools; None: it does neither.
    scheduling_policy: under fcfs nobody may ask for a priority, which would do nothing.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer,
        served_model_name: str,
        max_model_len: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        default_sampling_params: Mapping[str, float | int],
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        seed: int | None = None,
        answer_form: AnswerForm | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.answer_form = answer_form or AnswerForm()
        self.served_model_name = served_model_name
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self.default_sampling_params = dict(default_sampling_params)
        self.max_logprobs = vocab_size if max_logprobs == ALL_LOGPROBS else max_logprobs
        self.scheduling_policy = scheduling_policy
        self._grammars = GrammarCheck(tokenizer.files.folder, vocab_size)
        self._draw_seed: Callable[[int], int] = (
            secrets.randbits if seed is None else random.Random(seed).getrandbits
        )

    @classmethod
    def from_pretrained(
        cls,
        model_path: str | Path,
        *,
        served_model_name: str,
        max_model_len: int,
        max_logprobs: int = DEFAULT_MAX_LOGPROBS,
        scheduling_policy: Literal["fcfs", "priority"] = "fcfs",
        seed: int | None = None,
        tokenizer_mode: TokenizerMode = "auto",
        chat_template: str | Path | None = None,
        generation_config: Literal["auto", "vllm"] = "auto",
        tool_call_parser: ToolCallParser = "auto",
        reasoning_parser: ReasoningParser = "auto",
    ) -> "ModelFrontend":
        """Read a checkpoint's tokenizer files, config.json and generation_config.json.

        seed: requests without a seed draw theirs from it, in order of building; None: from the system.
        tokenizer_mode, chat_template: see `load_tokenizer`. generation_config: "vllm" leaves the
        checkpoint's sampling parameters alone; its ends of a stream count all the same.
        tool_call_parser, reasoning_parser: see `answer_form`.
        Errors: CheckpointError; ConfigError for chat_template.
        """
        directory = Path(model_path)
        tokenizer = load_tokenizer(directory, mode=tokenizer_mode, chat_template=chat_template)
        generation = ModelFolder(directory).read_object("generation_config.json") or {}
        config = tokenizer.files.object(CONFIG)
        return cls(
            tokenizer=tokenizer,
            served_model_name=served_model_name,
            max_model_len=max_model_len,
            vocab_size=ModelConfig.from_pretrained(directory).vocab_size,
            eos_token_ids=eos_token_ids(generation, config, tokenizer.eos_token_id),
            default_sampling_params=(
                default_sampling_params(generation) if generation_config == "auto" else {}
            ),
            max_logprobs=max_logprobs,
            scheduling_policy=scheduling_policy,
            seed=seed,
            answer_form=answer_form(
                tokenizer.template_source,
                tokenizer.backend,
                tool_call_parser=tool_call_parser,
                reasoning_parser=reasoning_parser,
            ),
        )

    @classmethod
    def of_group(cls, config: GroupConfig) -> "ModelFrontend":
        """The front end that a group's settings describe. Errors: as from_pretrained."""
        return cls.from_pretrained(
            config.model_path,
            served_model_name=config.served_model_name,
            max_model_len=config.max_model_len,
            max_logprobs=config.max_logprobs,
            scheduling_policy=config.scheduling_policy,
            seed=config.seed,
            tokenizer_mode=config.tokenizer_mode,
            chat_template=config.chat_template,
            generation_config=config.generation_config,
            tool_call_parser=config.tool_call_parser,
            reasoning_parser=config.reasoning_parser,
        )

    def sampling_defaults(self, *, max_tokens: int | None = 16) -> SamplingParams:
        """The parameters of a request that states none: the checkpoint's, else SamplingParams' own."""
        defaults: dict[str, Any] = {"max_tokens": max_tokens} | self.default_sampling_params
        return SamplingParams(**defaults)

    def build_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        default_max_tokens: int | None = None,
    ) -> Request:
        """A request that the coordinator can trust, with its effective seed and parameters.

        params: None stands for the checkpoint's defaults. default_max_tokens: the most tokens where
        params.max_tokens is None; None: all that the context holds.

        With n > 1 it stands for several requests (cluster.answering.choices), one a completion.
        prompt: text, which gets the tokenizer's special tokens, or token ids, taken as they are.
        priority: lower is served first; only under --scheduling-policy priority. cache_salt: cached prefixes
        are shared with requests of the same salt alone.
        Errors: InvalidRequestError naming field, value, limit.
        """
        if params is None:
            params = self.sampling_defaults()
            params, default_max_tokens = replace(params, max_tokens=None), params.max_tokens
        token_ids = self.encode_prompt(prompt)
        params = with_fitting_length(
            self._effective(params),
            num_prompt_tokens=len(token_ids),
            max_model_len=self.max_model_len,
            default_max_tokens=default_max_tokens,
        )
        self._check_priority(priority)
        _check_cache_salt(cache_salt)
        if params.structured_outputs is not None:
            require_end_of_text(params, self.eos_token_ids)
            self._grammars.require_enforceable(params.structured_outputs)
        bad_words = bad_word_ids(params.bad_words, self.tokenizer)
        require_candidates(
            params, bad_words=bad_words, eos_token_ids=self.eos_token_ids, vocab_size=self.vocab_size
        )
        seed = self._draw_seed(64) if params.seed is None else params.seed % 2**64
        return Request(
            request_id=request_id,
            prompt_token_ids=token_ids,
            params=params,
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            cache_salt=cache_salt,
            priority=priority,
            bad_words=bad_words,
        )

    def encode_prompt(
        self, prompt: str | Sequence[int], *, add_special_tokens: bool = True
    ) -> tuple[int, ...]:
        """Validated token ids of a prompt. add_special_tokens: to a text. Errors: InvalidRequestError."""
        if not isinstance(prompt, str) and not isinstance(prompt, Sequence):
            raise InvalidRequestError(
                f"prompt is {kind_of(prompt)}; it must be text or a list of token ids", field="prompt"
            )
        if len(prompt) == 0:
            raise InvalidRequestError(
                "prompt is empty; it must hold at least one character or token id", field="prompt"
            )
        if isinstance(prompt, str):
            self._require_short_enough(prompt, "prompt")
            require_text(prompt, "prompt")
        token_ids = (
            self.tokenizer.encode(prompt, add_special_tokens=add_special_tokens)
            if isinstance(prompt, str)
            else prompt
        )
        require_prompt_fits(len(token_ids), self.max_model_len)
        found = tuple(token_ids)
        self.require_token_ids(found, "prompt")
        return found

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> list[int]:
        """Token ids of a chat. chat_template_kwargs: the template's own arguments, such as enable_thinking.

        continue_final_message: the last message is left open, for the model to go on with; else the
        assistant's turn is begun, unless add_generation_prompt is False. add_special_tokens: also the
        tokenizer's own, to those that the template writes.
        Errors: InvalidRequestError: no chat template, malformed messages, refused by the template.
        """
        if add_generation_prompt and continue_final_message:
            raise InvalidRequestError(
                "continue_final_message and add_generation_prompt are both true; the model can go on with a "
                "message or begin one: set one of them to false",
                field="continue_final_message",
            )
        chat = checked_messages(messages)
        require_known_fields(chat, self.tokenizer.knows_field)
        text = self.tokenizer.render_chat(
            left_open(chat) if continue_final_message else chat,
            add_generation_prompt=not continue_final_message and add_generation_prompt is not False,
            tools=checked_tools(tools),
            template_kwargs=chat_template_kwargs,
        )
        if continue_final_message:
            text = until_open_end(text)
        self._require_short_enough(text, "messages")
        require_text(text, "messages")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def max_prompt_characters(self) -> int | None:
        """More characters are surely more tokens than the context holds; None: no such number is known."""
        longest = longest_token(self.tokenizer.backend)
        return None if longest is None else longest * (self.max_model_len - 1)

    def _require_short_enough(self, text: str, field: str) -> None:
        """Errors: ContextLengthError for a text that cannot fit, before it costs seconds to know by how
        much."""
        if len(text) < self.max_model_len:
            return
        limit = self.max_prompt_characters
        if limit is not None and len(text) > limit:
            raise ContextLengthError(
                f"{field} {'has' if field == 'prompt' else 'have'} {len(text)} characters; max_model_len "
                f"{self.max_model_len} leaves room for {self.max_model_len - 1} tokens, of at most "
                f"{limit // (self.max_model_len - 1)} characters each: shorten the text or raise "
                "--max-model-len",
                field=field,
            )

    def text_stream(self, params: SamplingParams) -> TextStream:
        """The text of one completion under these parameters."""
        return TextStream.of(params, self.tokenizer.backend)

    def _effective(self, params: SamplingParams) -> SamplingParams:
        """Token ids checked, -1 logprobs resolved. Errors: InvalidRequestError."""
        for field in TOKEN_ID_PARAMETERS:
            self.require_token_ids(getattr(params, field) or (), field)
        counts = {}
        for field in ("logprobs", "prompt_logprobs"):
            asked = getattr(params, field)
            if asked is None:
                continue
            counts[field] = self.vocab_size if asked == ALL_LOGPROBS else min(asked, self.vocab_size)
            if counts[field] > self.max_logprobs:
                raise InvalidRequestError(
                    f"{field} is {asked}; it must be from 0 to {self.max_logprobs}, the server's "
                    "--max-logprobs (which -1 opens to the whole vocabulary)",
                    field=field,
                )
        return replace(params, **counts)

    def _check_priority(self, priority: object) -> None:
        legal = isinstance(priority, int) and not isinstance(priority, bool)
        if not legal or not -(2**63) <= priority < 2**63:  # type: ignore[operator]
            raise InvalidRequestError(
                f"priority is {shown(priority)}; it must be a whole number of 64 bits; lower ones are served "
                "first",
                field="priority",
            )
        if priority and self.scheduling_policy != "priority":
            raise InvalidRequestError(
                f"priority is {priority}, which {self.scheduling_policy} scheduling does not look at; "
                "leave it out, or serve with --scheduling-policy priority",
                field="priority",
            )

    def require_token_ids(self, token_ids: Collection[int], field: str) -> None:
        """Errors: InvalidRequestError for one that is none of the vocabulary."""
        require_token_ids(token_ids, field, vocab_size=self.vocab_size, model=self.served_model_name)


def _check_cache_salt(salt: object) -> None:
    if salt is not None and (not is_text(salt) or not 0 < len(salt) <= MAX_CACHE_SALT):  # type: ignore[arg-type]
        raise InvalidRequestError(
            f"cache_salt is {shown(salt)}; it must be text of 1 to {MAX_CACHE_SALT} characters, or left out",
            field="cache_salt",
        )
