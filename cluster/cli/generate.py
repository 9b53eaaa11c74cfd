"""`latentray generate`: prompts from the command line or stdin, text as it comes."""

import dataclasses
import json
import sys
from contextlib import closing
from typing import Annotated, Any

import msgspec
import typer

from actors.sampling_params import SamplingParams
from cluster.answering.choices import choices
from cluster.cli.answers import Answer, Show, ask_engine, ask_server, frontend_of_server
from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.config import EngineArgs, Settings
from cluster.config.sources import flag_name
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import ConfigError

DEFAULT_MAX_TOKENS = 256
_SAMPLING = "Sampling (default: what the checkpoint recommends)"


@with_settings(EngineArgs)
def generate(
    settings: Settings[EngineArgs],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PROMPT]...", help="Prompts; none or - reads one from stdin."),
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Send each prompt as a user's message.")] = False,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            "--chat-template-kwargs",
            metavar="JSON",
            help='With --chat: arguments of the chat template, such as {"thinking": true}.',
        ),
    ] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", metavar="N", rich_help_panel=_SAMPLING)
    ] = DEFAULT_MAX_TOKENS,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", metavar="T", help="0 is greedy.", rich_help_panel=_SAMPLING),
    ] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", metavar="N", rich_help_panel=_SAMPLING)] = None,
    top_p: Annotated[float | None, typer.Option("--top-p", metavar="P", rich_help_panel=_SAMPLING)] = None,
    min_p: Annotated[float | None, typer.Option("--min-p", metavar="P", rich_help_panel=_SAMPLING)] = None,
    presence_penalty: Annotated[
        float | None,
        typer.Option(
            "--presence-penalty",
            metavar="X",
            help="-2 to 2, once for tokens the completion holds.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    frequency_penalty: Annotated[
        float | None,
        typer.Option(
            "--frequency-penalty",
            metavar="X",
            help="-2 to 2, for each time the completion holds a token.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    repetition_penalty: Annotated[
        float | None,
        typer.Option(
            "--repetition-penalty",
            metavar="X",
            help="Above 1 against tokens of prompt and completion.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    min_tokens: Annotated[
        int | None,
        typer.Option(
            "--min-tokens", metavar="N", help="No end before as many tokens.", rich_help_panel=_SAMPLING
        ),
    ] = None,
    bad_words: Annotated[
        list[str] | None,
        typer.Option(
            "--bad-words",
            metavar="TEXT",
            help="Never generate TEXT; may be repeated.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    n: Annotated[
        int | None,
        typer.Option("--n", "-n", metavar="N", help="Completions of each prompt.", rich_help_panel=_SAMPLING),
    ] = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(
            "--stop",
            metavar="TEXT",
            help="End the text before TEXT; may be repeated.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on to --max-tokens.", rich_help_panel=_SAMPLING)
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            "--server",
            metavar="HOST:PORT",
            envvar="LATENTRAY_SERVER",
            help="Ask a running server instead of starting an engine.",
        ),
    ] = None,
    executor: Annotated[
        str, typer.Option("--executor", metavar="NAME", help="inline: in this process, or ray.")
    ] = "inline",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each prompt.")] = False,
) -> None:
    """Generate text for prompts, and print it as it comes.

    --seed makes the answers repeatable: without a server, and with one.
    """
    template_kwargs = _template_kwargs(chat_template_kwargs, chat=chat)
    texts = _read_prompts(prompts or [])
    given: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "repetition_penalty": repetition_penalty,
        "min_tokens": min_tokens,
        "bad_words": bad_words,
        "n": n,
        "stop": stop,
    }
    if settings.origins["seed"] != "default":
        given["seed"] = settings.args.seed
    changes = {name: value for name, value in given.items() if value is not None} | {"ignore_eos": ignore_eos}
    show = _show_json if as_json else _Printer(separated=len(texts) * (n or 1) > 1)
    if server is not None:
        _refuse_engine_flags(settings)
        frontend = frontend_of_server(server)
        contents = _contents(texts, frontend, chat, template_kwargs)
        ask_server(server, contents, _params(frontend, max_tokens, changes), show)
        return
    _generate_here(settings, executor, texts, chat, template_kwargs, max_tokens, changes, show)


def _generate_here(
    settings: Settings[EngineArgs],
    executor: str,
    texts: list[str],
    chat: bool,
    template_kwargs: dict[str, Any] | None,
    max_tokens: int,
    changes: dict[str, Any],
    show: Show,
) -> None:
    from cluster.answering.engine import start_engine

    config = settings.args.resolve()
    frontend = ModelFrontend.of_group(config)
    params = _params(frontend, max_tokens, changes)
    requests = [
        part
        for i, content in enumerate(_contents(texts, frontend, chat, template_kwargs))
        for part in choices(frontend.build_request(str(i), content, params))
    ]
    with closing(ProgressLine()) as progress:
        progress("loading the model")
        engine = start_engine(
            config,
            executor=executor,
            tokenizer=frontend.tokenizer.backend,
            address=settings.args.address,
            trace_file=settings.args.trace,
            progress=progress,
        )
    with closing(engine):
        ask_engine(engine, requests, frontend, show)


def _read_prompts(prompts: list[str]) -> list[str]:
    if prompts and prompts != ["-"]:
        return prompts
    if not prompts and sys.stdin.isatty():
        raise ConfigError("no prompt; pass one as an argument, or write it to stdin (`echo Hello | ...`)")
    return [sys.stdin.read()]


def _template_kwargs(given: str | None, *, chat: bool) -> dict[str, Any] | None:
    if given is None:
        return None
    if not chat:
        raise ConfigError("chat-template-kwargs says how chats are written; pass --chat too, or leave it out")
    try:
        kwargs = json.loads(given)
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ConfigError(
            f'chat-template-kwargs is {given!r}; it must be a JSON object such as {{"thinking": true}}'
        )
    return kwargs


def _contents(
    texts: list[str], frontend: ModelFrontend, chat: bool, template_kwargs: dict[str, Any] | None
) -> list[str | list[int]]:
    if not chat:
        return list(texts)
    return [
        frontend.render_chat([{"role": "user", "content": text}], chat_template_kwargs=template_kwargs)
        for text in texts
    ]


def _params(frontend: ModelFrontend, max_tokens: int, changes: dict[str, Any]) -> SamplingParams:
    defaults = frontend.sampling_defaults()
    return msgspec.structs.replace(defaults, max_tokens=max_tokens, **changes)


def _refuse_engine_flags(settings: Settings[EngineArgs]) -> None:
    names = [
        flag_name(field)
        for field, origin in settings.origins.items()
        if origin.startswith("flag") and field != "seed"
    ]
    if names:
        raise ConfigError(
            f"{', '.join(names)} would configure an engine, but --server asks one that runs already; "
            "leave out one or the other"
        )


def _show_json(index: int, piece: str, answer: Answer | None) -> None:
    if answer is not None:
        typer.echo(json.dumps({"index": index} | dataclasses.asdict(answer), ensure_ascii=False))


class _Printer:
    """Prints the answers in order: the first one as it comes, the others as soon as it is their turn."""

    def __init__(self, *, separated: bool) -> None:
        self._separated = separated
        self._turn = 0
        self._waiting: dict[int, list[str]] = {}
        self._finished: dict[int, Answer] = {}

    def __call__(self, index: int, piece: str, answer: Answer | None) -> None:
        self._waiting.setdefault(index, []).append(piece)
        if answer is not None:
            self._finished[index] = answer
        while pieces := self._waiting.pop(self._turn, None):
            sys.stdout.write("".join(pieces))
            sys.stdout.flush()
            if self._turn not in self._finished:
                break
            sys.stdout.write("\n\n" if self._separated else "\n")
            sys.stdout.flush()
            self._turn += 1
