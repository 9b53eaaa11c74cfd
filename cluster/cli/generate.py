"""`latentray generate`: prompts from the command line or stdin, text as it comes."""

from collections.abc import Sequence
from contextlib import closing
from typing import Annotated, Any

import typer

from actors.config import GroupConfig
from actors.requests import Request
from actors.sampling_params import SamplingParams
from cluster.answering.engine import check_executor, start_engine
from cluster.cli.answer_printer import AnswerPrinter, print_json
from cluster.cli.answers import Show, ask_engine, ask_server, frontend_of_server
from cluster.cli.engine_flags import with_settings
from cluster.cli.progress_line import ProgressLine
from cluster.cli.prompts import contents, parse_template_kwargs, read_texts
from cluster.cli.sampling_flags import with_sampling_flags
from cluster.cli.server_flags import with_credentials
from cluster.client.credentials import Credentials
from cluster.config import EngineArgs, Settings
from cluster.config.resolve import resolve
from cluster.config.setting import flag_name
from cluster.frontend.front_end import ModelFrontend
from cluster.frontend.limits import with_fitting_length
from kernels_integration.errors import ConfigError

DEFAULT_MAX_TOKENS = 256
_SHOWN_BY_JSON = ("logprobs", "prompt_logprobs")


@with_settings(EngineArgs)
@with_sampling_flags
@with_credentials
def generate(
    settings: Settings[EngineArgs],
    credentials: Credentials,
    sampling: dict[str, Any],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT", help="Prompts; none or - reads one from stdin."),
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

    Completions have 256 tokens at most where --max-tokens is not given, and end where the context does.
    --seed makes the answers repeatable: without a server, and with one.
    """
    if not as_json and (hidden := [flag_name(name) for name in _SHOWN_BY_JSON if name in sampling]):
        raise ConfigError(f"{', '.join(hidden)} would not be shown; pass --json too, or leave it out")
    if settings.origins["seed"] != "default":
        sampling = sampling | {"seed": settings.args.seed}
    check_executor(executor)
    template_kwargs = parse_template_kwargs(chat_template_kwargs, chat=chat)
    texts = read_texts(prompts or [])
    if server is None and credentials.speaks_tls:
        raise ConfigError(
            "--tls, --tls-ca, --tls-cert and --tls-key are of a --server; give one, or leave them out"
        )
    if server is not None:
        _refuse_engine_flags(settings)
        frontend = frontend_of_server(server, credentials)
    else:
        config = resolve(settings.args)
        frontend = ModelFrontend.of_group(config)
    defaults = dict(frontend.default_sampling_params) | {"max_tokens": None}
    params = SamplingParams(**defaults | sampling)
    asked = contents(texts, frontend, chat=chat, template_kwargs=template_kwargs)
    show = print_json if as_json else AnswerPrinter(separated=len(asked) * params.n > 1)
    if server is not None:
        questions = [(content, _with_length(params, content, frontend)) for content in asked]
        ask_server(server, credentials, questions, show)
        return
    requests = [
        frontend.build_request(str(i), content, params, default_max_tokens=DEFAULT_MAX_TOKENS)
        for i, content in enumerate(asked)
    ]
    _answer_here(settings.args, config, executor, requests, frontend, show)


def _answer_here(
    args: EngineArgs,
    config: GroupConfig,
    executor: str,
    requests: Sequence[Request],
    frontend: ModelFrontend,
    show: Show,
) -> None:
    with closing(ProgressLine()) as progress:
        progress("loading the model")
        engine = start_engine(
            config,
            executor=executor,
            tokenizer=frontend.tokenizer.backend,
            address=args.address,
            trace_file=args.trace,
            progress=progress,
        )
    with closing(engine):
        ask_engine(engine, requests, frontend, show)


def _with_length(params: SamplingParams, content: str | list[int], frontend: ModelFrontend) -> SamplingParams:
    """The default length is this command's own; a server would go on to the context's end."""
    if params.max_tokens is not None:
        return params
    return with_fitting_length(
        params,
        num_prompt_tokens=len(frontend.encode_prompt(content)),
        max_model_len=frontend.max_model_len,
        default_max_tokens=DEFAULT_MAX_TOKENS,
    )


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
