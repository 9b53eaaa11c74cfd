"""Flags of sampling parameters: every declared one, and what becomes of its text."""

import typer
from typer.testing import CliRunner

from actors.sampling_params import PARAMETERS, SamplingParams
from actors.structured_outputs import StructuredOutputs
from cluster.cli.sampling_flags import with_sampling_flags
from cluster.config.setting import flag_name

# What a user writes for each parameter that has a flag, and what it means.
WRITTEN = {
    "temperature": (["--temperature", "0.5"], 0.5),
    "top_k": (["--top-k", "7"], 7),
    "top_p": (["--top-p", "0.5"], 0.5),
    "min_p": (["--min-p", "0.25"], 0.25),
    "presence_penalty": (["--presence-penalty", "-1"], -1.0),
    "frequency_penalty": (["--frequency-penalty", "1.5"], 1.5),
    "repetition_penalty": (["--repetition-penalty", "2"], 2.0),
    "logit_bias": (["--logit-bias", '{"5": -1, "6": 2.5}'], {5: -1, 6: 2.5}),
    "allowed_token_ids": (["--allowed-token-ids", "5, 6,7"], (5, 6, 7)),
    "structured_outputs": (
        ["--structured-outputs", '{"regex": "a+"}'],
        StructuredOutputs("regex", "a+"),
    ),
    "min_tokens": (["--min-tokens", "2"], 2),
    "logprobs": (["--logprobs", "3"], 3),
    "prompt_logprobs": (["--prompt-logprobs", "0"], 0),
    "n": (["-n", "2"], 2),
    "bad_words": (["--bad-words", "no", "--bad-words", "never"], ("no", "never")),
    "max_tokens": (["--max-tokens", "9"], 9),
    "stop": (["--stop", "a,b", "--stop", "c"], ("a,b", "c")),
    "stop_token_ids": (["--stop-token-ids", "4"], (4,)),
    "include_stop_str_in_output": (["--include-stop-str-in-output"], True),
    "ignore_eos": (["--ignore-eos"], True),
    "skip_special_tokens": (["--no-skip-special-tokens"], False),
}


def parsed(argv: list[str]) -> SamplingParams:
    found = []
    app = typer.Typer()
    app.command()(with_sampling_flags(lambda sampling: found.append(SamplingParams(**sampling))))
    result = CliRunner().invoke(app, argv, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return found[0]


def test_every_parameter_with_a_flag_is_written_above() -> None:
    assert WRITTEN.keys() == {name for name, row in PARAMETERS.items() if row.flag}


def test_a_flag_sets_its_parameter_alone() -> None:
    default = SamplingParams()
    assert parsed([]) == default
    for name, (argv, value) in WRITTEN.items():
        found = parsed(argv)
        assert getattr(found, name) == value
        changed = {other for other in PARAMETERS if getattr(found, other) != getattr(default, other)}
        assert changed == {name}


def test_all_flags_together() -> None:
    argv = [word for words, _ in WRITTEN.values() for word in words]
    assert parsed(argv) == SamplingParams(**{name: value for name, (_, value) in WRITTEN.items()})


def test_help_tells_what_is_legal() -> None:
    app = typer.Typer(rich_markup_mode=None)
    app.command()(with_sampling_flags(lambda sampling: None))
    text = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    for name, row in PARAMETERS.items():
        assert (flag_name(name) in text) == row.flag
        if row.flag:
            assert " ".join(row.help.split()) in text
