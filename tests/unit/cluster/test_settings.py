"""Sources of settings: precedence, parsing, and what is said of mistakes."""

import json
import os
import re
from pathlib import Path
from typing import Annotated, Any

import jsonschema
import pytest
import typer
from typer.testing import CliRunner

import cluster
from cluster.cli import main
from cluster.cli.engine_flags import with_settings
from cluster.config import EngineArgs, ServeArgs, Settings, load_settings
from cluster.config.setting import Setting, declared
from cluster.config.sizes import format_size, parse_size
from cluster.config.values import Count
from kernels_integration.errors import ConfigError, shown


def load(given: dict[str, Any] | None = None, *, file: Path | None = None, **environ: str) -> Any:
    return load_settings(ServeArgs, given, spelling="flag", config_file=file, environ=environ)


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_defaults_are_overridden_by_file_then_environment_then_flags(tmp_path: Path) -> None:
    file = write(
        tmp_path / "c.yaml", "block-size: 4\nmax_num_seqs: 5\nmax-num-batched-tokens: 512\nport: 1\n"
    )
    settings = load(
        {"block_size": "64", "model": None},
        file=file,
        LATENTRAY_BLOCK_SIZE="32",
        LATENTRAY_MAX_NUM_SEQS="6",
        PATH="/bin",
    )
    args, origins = settings.args, settings.origins
    assert (args.block_size, args.max_num_seqs, args.max_num_batched_tokens) == (64, 6, 512)
    assert args.tensor_parallel_size == 1
    assert origins["block_size"] == "flag --block-size"
    assert origins["max_num_seqs"] == "environment LATENTRAY_MAX_NUM_SEQS"
    assert origins["max_num_batched_tokens"] == f"file {file}: max-num-batched-tokens"
    assert origins["tensor_parallel_size"] == "default"
    assert origins["model"] == "default"


def test_the_environment_may_name_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "block_size: 8\n")
    assert load(LATENTRAY_CONFIG=str(file)).args.block_size == 8


def test_an_engine_reads_a_file_of_a_server(tmp_path: Path) -> None:
    file = write(tmp_path / "c.yaml", "port: 9\nblock_size: 8\n")
    assert load_settings(EngineArgs, config_file=file, environ={}).args.block_size == 8


@pytest.mark.parametrize(
    "value", ['{"method":"mtp","num_speculative_tokens":2}', {"num_speculative_tokens": 2}]
)
def test_both_spellings_of_speculation_are_one_setting(value: Any) -> None:
    settings = load({"speculative_config": value}, LATENTRAY_NUM_SPECULATIVE_TOKENS="5")
    assert settings.args.num_speculative_tokens == 2
    assert settings.origins["num_speculative_tokens"] == "flag --speculative-config"
    # and the other way round: the later source wins, whichever spelling it uses
    later = load(
        {"num_speculative_tokens": "5"},
        LATENTRAY_SPECULATIVE_CONFIG=json.dumps({"num_speculative_tokens": 2}),
    )
    assert later.args.num_speculative_tokens == 5


def test_two_spellings_in_one_source_must_agree() -> None:
    assert load({"speculative_config": {"num_speculative_tokens": 2}, "num_speculative_tokens": "2"}).args
    with pytest.raises(ConfigError, match="they are one setting"):
        load({"speculative_config": {"num_speculative_tokens": 2}, "num_speculative_tokens": "3"})


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("tensor_parallel_size", "two", "a whole number >= 1"),
        ("tensor_parallel_size", "0", "a whole number >= 1"),
        ("block_size", True, "a whole number from 1 to 65536"),
        ("block_size", 16.0, "a whole number from 1 to 65536"),
        ("num_speculative_tokens", "9", "from 0 to 8"),
        ("num_speculative_tokens", "-1", "from 0 to 8"),
        ("speculative_config", "{", "JSON such as"),
        ("speculative_config", '{"method":"eagle","num_speculative_tokens":1}', "JSON such as"),
        ("speculative_config", '{"method":"mtp","num_speculative_tokens":9}', "0 to 8 tokens"),
        ("speculative_config", '{"num_speculative_tokens":1,"draft":2}', "JSON such as"),
        ("dtype", "float8", "auto, float32, float64 or bfloat16"),
        ("kv_cache_dtype", "int8", "auto, float32, float64, bfloat16 or fp8_ds_mla"),
        ("indexer_kv_dtype", "fp8_ds_mla", "auto, float32, float64, bfloat16 or fp8"),
        ("attention_backend", "flash", "auto, native, torch, triton or aiter"),
        ("kv_cache_memory_bytes", "lots", "such as 512M"),
        ("kv_cache_memory_bytes", "0", "such as 512M"),
        ("seed", "-1", "from 0 to"),
        ("port", "70000", "from 0 to 65535"),
        ("http_port", "no", "from 0 to 65535, or none"),
        ("model", "", "the directory of a checkpoint"),
    ],
)
def test_an_illegal_value_is_named_with_its_rule(field: str, value: Any, rule: str) -> None:
    flag = "--" + field.replace("_", "-")
    with pytest.raises(ConfigError) as caught:
        load({field: value})
    assert flag in str(caught.value)
    assert shown(value) in str(caught.value)
    assert rule in str(caught.value)
    if isinstance(value, str) and value:
        with pytest.raises(ConfigError, match=f"environment LATENTRAY_{field.upper()}"):
            load({}, **{f"LATENTRAY_{field.upper()}": value})


@pytest.mark.parametrize(("value", "port"), [("none", None), (None, 8000), (0, 0), ("9000", 9000)])
def test_http_is_served_unless_it_is_turned_off(value: Any, port: int | None) -> None:
    assert load({"http_port": value} if value is not None else {}).args.http_port == port
    if value is not None:
        assert load({}, LATENTRAY_HTTP_PORT=str(value)).args.http_port == port


def test_json_may_not_nest_without_end() -> None:
    with pytest.raises(ConfigError, match=r"speculative-config is .* it must be JSON"):
        load({"speculative_config": "[" * 100_000})


def test_unknown_names_suggest_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean tensor_parallel_size"):
        load_settings(EngineArgs, {"tensor_paralel_size": 2}, environ={})
    with pytest.raises(ConfigError, match="LATENTRAY_BLOK_SIZE; did you mean LATENTRAY_BLOCK_SIZE"):
        load(LATENTRAY_BLOK_SIZE="2")
    with pytest.raises(ConfigError, match="max-num-sequences; did you mean max-num-seqs"):
        load(file=write(tmp_path / "c.yaml", "max-num-sequences: 2\n"))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("- 1\n", "holds a list"),
        ("a: [\n", "is no YAML"),
        ("port: 2024-99-99\n", "is no YAML: month must be in 1..12"),
        pytest.param("{" * 20_000, "is no YAML", id="deep"),
        ("block-size: 4\nblock_size: 8\n", "are the same setting"),
    ],
)
def test_a_bad_file_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(file=write(tmp_path / "c.yaml", text))
    with pytest.raises(ConfigError, match="cannot be read"):
        load(file=tmp_path / "none.yaml")


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load(file=write(tmp_path / "c.yaml", "# nothing\nblock_size:\n")).args == ServeArgs()


def test_paths_are_models_too(tmp_path: Path) -> None:
    assert load_settings(EngineArgs, {"model": tmp_path}, environ={}).args.model == str(tmp_path)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1", 1), (77, 77), ("512M", 2**29), ("2g", 2**31), ("1.5 GiB", 3 * 2**29), ("64KB", 2**16)],
)
def test_sizes(text: str | int, num_bytes: int) -> None:
    assert parse_size(text) == num_bytes
    schema = ServeArgs.model_json_schema()["properties"]["max_message_size"]
    jsonschema.validate(text, schema)


@pytest.mark.parametrize(
    "text", ["", "0", "0.2", "0.9", "1.5", "-1", "1e9", "9" * 400, "8388608T", "M", "1X", 1.5, True, None]
)
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size(text)


def test_sizes_are_shown_in_their_unit() -> None:
    assert [format_size(n) for n in (5, 2**10, 3 * 2**29, 2**50)] == [
        "5 B",
        "1.0 KiB",
        "1.5 GiB",
        "1024.0 TiB",
    ]


def test_the_schema_shows_every_setting_with_its_bounds() -> None:
    schema = ServeArgs.model_json_schema()
    properties = schema["properties"]
    assert properties.keys() == ServeArgs.model_fields.keys()
    assert all(p["description"] for p in properties.values())
    assert properties["block_size"]["minimum"] == 1
    drafts = properties["num_speculative_tokens"]["anyOf"][0]
    assert (drafts["minimum"], drafts["maximum"]) == (0, 8)
    assert properties["attention_backend"]["enum"] == ["auto", "native", "torch", "triton", "aiter"]


def test_a_setting_stands_where_it_is_declared_and_where_it_is_used() -> None:
    """One that is passed on as it is: its declaration, the processes' configuration, and its user."""
    root = Path(cluster.__file__).parents[1]
    files = [*root.glob("actors/**/*.py"), *root.glob("cluster/**/*.py")]
    for name, user in (
        ("prefix_caching_hash_algo", "actors/coordinator/coordinator.py"),
        ("max_logprobs", "cluster/frontend/front_end.py"),
    ):
        word = re.compile(rf"\b{name}\b")
        found = {
            str(file.relative_to(root)) for file in files if word.search(file.read_text(encoding="utf-8"))
        }
        assert found == {"cluster/config/args.py", "actors/config.py", user}


def test_a_setting_that_says_nowhere_what_is_legal_is_a_mistake() -> None:
    class Careless(EngineArgs):
        more: Annotated[int, Setting("More.", group="Model")] = 1

    with pytest.raises(TypeError, match="setting more says nowhere what is legal"):
        declared(Careless)


def test_a_new_field_is_a_setting_everywhere() -> None:
    class Larger(EngineArgs):
        more: Annotated[Count | None, Setting("More of it.", group="Model")] = None

    setting = declared(Larger)["more"]
    assert (setting.flag, setting.variable, setting.key) == ("--more", "LATENTRAY_MORE", "more")
    assert (setting.rule, setting.metavar, setting.default) == ("a whole number >= 1", "N", "none")
    assert load_settings(Larger, {"more": "3"}, environ={}).args.more == 3
    with pytest.raises(ConfigError, match="--more is 'x'; it must be a whole number >= 1"):
        load_settings(Larger, {"more": "x"}, spelling="flag", environ={})
    assert Larger.model_json_schema()["properties"]["more"]["description"] == "More of it."
    app = typer.Typer()

    def command(settings: Settings[Larger]) -> None:
        typer.echo(settings.args.more)

    app.command()(with_settings(Larger)(command))
    assert CliRunner().invoke(app, ["--more", "5"]).output == "5\n"


@pytest.mark.parametrize("last", ["model: *a8", "model: &b [*b]"], ids=["many", "itself"])
def test_a_config_file_of_endless_aliases_is_refused(tmp_path: Path, last: str) -> None:
    lines = ["- &a0 [x, x, x, x, x, x, x, x, x]"]
    lines += [f"- &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
    text = "trace:\n" + "".join(f"  {line}\n" for line in lines) if "a8" in last else ""
    with pytest.raises(ConfigError, match="holds more than 10000 values"):
        load(file=write(tmp_path / "c.yaml", text + last))


def test_a_config_file_is_read_to_a_bound_and_may_be_a_pipe() -> None:
    with pytest.raises(ConfigError, match="config file /dev/zero has more than 1048576 bytes"):
        load(file=Path("/dev/zero"))
    read, write_end = os.pipe()
    os.write(write_end, b"\xef\xbb\xbfblock-size: 8\n")
    os.close(write_end)
    try:
        assert load(file=Path(f"/dev/fd/{read}")).args.block_size == 8
    finally:
        os.close(read)


def test_config_show_tells_the_kv_caches_size_that_is_in_force(capsys: pytest.CaptureFixture[str]) -> None:
    def told(*flags: str) -> Any:
        with pytest.raises(SystemExit) as ended:
            main(["config", "show", "--json", *flags])
        assert ended.value.code == 0
        return json.loads(capsys.readouterr().out)["kv_cache_memory_bytes"]

    assert told() == {"value": 512 * 2**20, "origin": "default"}
    assert told("--kv-cache-memory-bytes", "1G")["value"] == 2**30
    assert told("--num-kv-blocks", "64")["value"] is None
