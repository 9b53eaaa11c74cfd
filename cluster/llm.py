"""The Python interface: an engine, prompts in, outputs out, named as in vLLM."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self, TypeAlias, cast

from actors.sampling_params import SamplingParams
from actors.stats import GroupStats
from cluster.answering.engine import Engine, Executor, Progress, check_executor, start_engine
from cluster.config import EngineArgs, load_settings
from cluster.config.resolve import resolve
from cluster.frontend.front_end import ModelFrontend
from cluster.outputs import OutputBuilder, RequestOutput
from cluster.report.progress import progress_bar
from kernels_integration.errors import InvalidRequestError, shown

Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or vLLM's {"prompt": text} and {"prompt_token_ids": ids}, both also with "cache_salt"."""
_PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
Message: TypeAlias = Mapping[str, Any]


class LLM:
    """A model in memory. Use it as a context manager, or call `close`.

    model: a checkpoint's directory; the bundled one by default. executor: "ray" runs the group on a Ray
    cluster; "inline" in this process, ranks as threads. config: a YAML file of settings. Every other
    setting of `cluster.config.EngineArgs` is a keyword; keywords win over the environment, which wins
    over the file.
    Errors: ConfigError (unknown keywords suggest the nearest), CheckpointError, UnavailableError.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        executor: Executor = "ray",
        config: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
        **settings: Any,
    ) -> None:
        check_executor(executor)
        args = load_settings(EngineArgs, {"model": model} | settings, config_file=config).args
        self.group_config = resolve(args)
        self.frontend = ModelFrontend.of_group(self.group_config)
        self._request_ids = map(str, itertools.count())
        self._engine: Engine | None = start_engine(
            self.group_config,
            executor=executor,
            tokenizer=self.frontend.tokenizer.backend,
            address=args.address,
            trace_file=args.trace,
            progress=progress,
        )

    @property
    def engine(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("this LLM was closed; make another")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for each prompt, in order.

        A list of ids is one prompt, a list of texts or of lists many. Without sampling_params the
        checkpoint's defaults apply; one is for all prompts, a list is one for each. priority: the same; lower
        is served first, under scheduling_policy="priority". use_tqdm: show progress, at a terminal.
        Errors: InvalidRequestError naming the prompt's index, before anything runs.
        """
        batch = [cast(Prompt, prompts)] if _is_one_prompt(prompts) else _listed("prompts", prompts)
        priorities = [priority] * len(batch) if isinstance(priority, int) else _listed("priority", priority)
        if len(priorities) != len(batch):
            raise InvalidRequestError(
                f"{len(priorities)} priorities for {len(batch)} prompts; pass one for all, or one for each",
                field="priority",
            )
        params = self._params_of(sampling_params, len(batch))
        return self._run(batch, params, priorities, use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """One output for each conversation; one list of messages is one conversation.

        tools: shown to the model by the chat template. chat_template_kwargs: the template's own arguments,
        such as {"enable_thinking": False}.
        """
        chats = _listed("messages", messages)
        if chats and isinstance(chats[0], Mapping):
            chats = [messages]
        prompts = []
        for index, chat in enumerate(chats):
            try:
                prompts.append(
                    self.frontend.render_chat(
                        chat,
                        add_generation_prompt=add_generation_prompt,
                        tools=tools,
                        chat_template_kwargs=chat_template_kwargs,
                    )
                )
            except InvalidRequestError as error:
                raise InvalidRequestError(f"conversation {index}: {error}", field=error.field) from error
        params = self._params_of(sampling_params, len(prompts))
        return self._run(prompts, params, [0] * len(prompts), use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What applies where no sampling parameters are given: the checkpoint's generation_config.json."""
        return self.frontend.sampling_defaults()

    def get_tokenizer(self) -> Any:
        """The model's `cluster.tokenizer.Tokenizer`."""
        return self.frontend.tokenizer

    def stats(self) -> GroupStats:
        """Counters of the group since it started."""
        return self.engine.stats()

    def close(self) -> None:
        """Stop the group and give its memory back. Closing twice is no error."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> list[SamplingParams | None]:
        if given is None or isinstance(given, SamplingParams):
            return [given] * num_prompts
        if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
            raise InvalidRequestError(
                f"sampling_params is {shown(given)}; it must be SamplingParams(...), or a list of them",
                field="sampling_params",
            )
        if len(given) != num_prompts:
            raise InvalidRequestError(
                f"{len(given)} sampling_params for {num_prompts} prompts; pass one for all, or one for each",
                field="sampling_params",
            )
        return list(given)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        *,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        each = zip(prompts, params, priorities, strict=True)
        builders = [self._builder(index, *one) for index, one in enumerate(each)]
        by_id = {builder.request.request_id: builder for builder in builders}
        updates = self.engine.run(builder.request for builder in builders)
        with progress_bar("Prompts", len(builders), enabled=use_tqdm) as bar, closing(updates):
            for request_id, update in updates:
                if isinstance(update, Exception):
                    raise update
                builder = by_id[request_id]
                builder.push(update)
                if builder.finished:
                    bar.advance()
        return [builder.output() for builder in builders]

    def _builder(
        self, index: int, prompt: Prompt, params: SamplingParams | None, priority: int
    ) -> OutputBuilder:
        try:
            content = _prompt_content(prompt)
            salt = prompt.get("cache_salt") if isinstance(prompt, Mapping) else None
            request = self.frontend.build_request(
                next(self._request_ids), content, params, priority=priority, cache_salt=salt
            )
        except InvalidRequestError as error:
            raise InvalidRequestError(f"prompt {index}: {error}", field=error.field) from error
        return OutputBuilder(request, self.frontend, prompt=content if isinstance(content, str) else None)

    def __repr__(self) -> str:
        return f"LLM({asdict(self.group_config)})"


def _listed(name: str, values: object) -> list[Any]:
    """Errors: InvalidRequestError where there is nothing to go through, such as a number."""
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise InvalidRequestError(f"{name} is {shown(values)}; it must be one, or a list of them", field=name)
    return list(values)


def _is_one_prompt(prompts: object) -> bool:
    if isinstance(prompts, str | Mapping):
        return True
    return isinstance(prompts, Sequence) and bool(prompts) and isinstance(prompts[0], int)


def _prompt_content(prompt: Prompt) -> str | Sequence[int]:
    if not isinstance(prompt, Mapping):
        return prompt
    for key in prompt:
        if key not in _PROMPT_KEYS:
            raise InvalidRequestError(
                f"prompt holds {shown(key)}; it may hold {', '.join(_PROMPT_KEYS)}", field="prompt"
            )
    for key in ("prompt_token_ids", "prompt"):
        if key in prompt:
            return cast("str | Sequence[int]", prompt[key])
    raise InvalidRequestError(
        f"prompt is an object with {', '.join(map(str, prompt)) or 'nothing'}; it must hold prompt or "
        "prompt_token_ids",
        field="prompt",
    )
