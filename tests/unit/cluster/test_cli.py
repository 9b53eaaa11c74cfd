"""The command line without an engine: flags, messages, exit codes."""

import io
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from actors.sampling_params import PARAMETERS
from cluster import __version__, errors
from cluster.cli import main
from cluster.cli.answer_printer import AnswerPrinter
from cluster.cli.progress_line import ProgressLine
from cluster.cli.tables import in_words
from cluster.config import EngineArgs, ServeArgs, load_settings
from cluster.config.reference import settings_page
from cluster.config.resolve import resolve
from cluster.config.setting import declared
from cluster.report import doctor
from cluster.report.memory import memory_check
from kernels_integration.errors import ConfigError

ROOT = Path(doctor.__file__).parents[2]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("LATENTRAY_SERVER", "LATENTRAY_CONFIG", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as caught:
        main(list(argv))
    return int(caught.value.code or 0)


def test_every_setting_is_a_flag_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    for command, cls in (("serve", ServeArgs), ("generate", EngineArgs), ("batch", EngineArgs)):
        assert run(command, "--help") == 0
        text = " ".join(capsys.readouterr().out.split())
        for setting in declared(cls).values():
            assert setting.flag in text
            assert " ".join(setting.help.split()) in text
    for short in ("-tp", "-dcp", "-sc"):
        assert f"{short}," in text


def test_every_setting_has_a_rule() -> None:
    for setting in declared(ServeArgs).values():
        assert setting.rule
        assert setting.default
        assert setting.group


def show(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert run("config", "show", "--json", *flags) == 0
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    return shown


def test_flags_are_spelled_as_in_vllm(capsys: pytest.CaptureFixture[str]) -> None:
    shown = show(
        capsys,
        *("-tp", "4", "-dcp", "2", "--cp-kv-cache-interleave-size", "8", "--block-size=32"),
        *("--speculative-config", '{"method":"mtp","num_speculative_tokens":2}', "--max-model-len", "100"),
        *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--kv-cache-dtype", "float64"),
        *("--dtype", "float64", "--attention-backend", "torch", "--seed", "9", "--host", "0.0.0.0"),
        *("--port", "0", "--address", "auto", "--num-kv-blocks", "64", "--enable-expert-parallel"),
    )
    values = {name: setting["value"] for name, setting in shown.items()}
    assert values["tensor_parallel_size"] == 4
    assert values["decode_context_parallel_size"] == 2
    assert values["cp_kv_cache_interleave_size"] == 8
    assert values["enable_expert_parallel"] is True
    assert values["num_speculative_tokens"] == 2
    assert (values["block_size"], values["max_model_len"], values["seed"]) == (32, 100, 9)
    assert (values["host"], values["port"], values["address"]) == ("0.0.0.0", 0, "auto")
    assert shown["tensor_parallel_size"]["origin"] == "flag --tensor-parallel-size"
    assert shown["num_speculative_tokens"]["origin"] == "flag --speculative-config"


def test_file_environment_and_flag_in_one_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("tensor-parallel-size: 2\nblock-size: 4\nmax-num-seqs: 3\n")
    monkeypatch.setenv("LATENTRAY_BLOCK_SIZE", "8")
    shown = show(capsys, "--config", str(file), "--max-num-seqs", "5")
    assert [shown[n]["value"] for n in ("tensor_parallel_size", "block_size", "max_num_seqs")] == [2, 8, 5]


def test_config_show_is_a_table_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "show", "-tp", "2") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["setting", "value", "from"]
    assert any(line.split()[:2] == ["tensor_parallel_size", "2"] for line in lines)


def test_no_python_is_shown_to_people(capsys: pytest.CaptureFixture[str]) -> None:
    table = "[[1,8,3],[9,64,1]]"
    for flags in ((), ("--num-speculative-tokens-per-batch-size", table)):
        assert run("config", "show", *flags) == 0
        rows = [line.split() for line in capsys.readouterr().out.splitlines()]
        for words in rows:
            assert not {"-", "None", "True", "False", "()"} & set(words)
            assert not any(word.startswith("(") for word in words)
    assert "[[1, 8, 3], [9, 64, 1]]" in " ".join(" ".join(words) for words in rows)
    assert [in_words(v) for v in (None, (), [], True, (1, 2), ["a"], 0)] == [
        *("none", "none", "none", "true", "1, 2", "a", "0")
    ]
    numbers = {"temperature": 0.7, "seen": 12345.67891, "eps": 1.23456e-7, "drains": False}
    assert in_words(numbers) == "temperature 0.7, seen 12345.679, eps 1.235e-07, drains false"


@pytest.mark.parametrize("command", ["generate", "inspect", "bench", "serve", "batch", "status", "doctor"])
def test_help_tells_no_types_of_python(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert not re.search(r"<(list|str|int|float|bool|path)\b", text), text
    assert "]...]" not in text


def test_config_show_tells_the_file_of_the_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "trace.json")
    for flags, row in (((), "none default"), (("--trace", file), f"{file} flag --trace")):
        assert run("config", "show", *flags) == 0
        assert f"trace {row}" in [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]


def test_config_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("config", "schema") == 0
    assert "tensor_parallel_size" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--tensor-paralel-size", "2"], "--tensor-parallel-size"),
        (["servee"], "serve"),
        (["serve", "./m"], "serve takes no argument './m'; a model is given as --model ./m"),
        (["status", "x"], "status takes no argument 'x'"),
        (["serve", "--kv-cache-memory-bytes", "0.9"], "is '0.9'; it must be a size"),
        (["serve", "--tp", "2"], "there is no tp: use --tensor-parallel-size or -tp"),
        (["serve", "--mem-fraction-static=0.9"], "use --gpu-memory-utilization on a GPU"),
        (["serve", "--api-key", "x"], "there is no api_key"),
        (["serve", "--dp-size", "2"], "there is no dp_size: use --num-groups"),
        (["doctor", "-dp", "2"], "there is no dp: use --num-groups"),
        (["config", "show", "-q", "fp8"], "there is no q: it is read from the checkpoint"),
        (["serve", "--enforce-eager"], "there is no enforce_eager: steps are recorded as graphs where that"),
        (["inspect", "--model=/m"], "inspect takes no --model; the directory is its argument: inspect /m"),
        (["generate", "x", "--port", "1"], "generate takes no --port; it is a flag of demo, serve, doctor"),
        (["serve", "--max-model-len", "32k"], "--max-model-len is '32k'; it must be a whole number >= 1: "),
        (["serve", "--max-model-len", "32k"], "write 32000 or 32768"),
        (["batch", "-i", "x"], "--output"),
        (["config", "show", "-tp", "4", "-dcp", "3"], "use 1, 2 or 4"),
        (["config", "show", "-tp", "x"], "--tensor-parallel-size is 'x'; it must be a whole number >= 1"),
        (["serve", "--model", "/nope"], "no such model path: /nope"),
        (["generate", "x", "--temperature", "-1"], "temperature is -1.0"),
        (["generate", "x", "--temperature", "warm"], "--temperature is 'warm'; it must be a number from 0"),
        (["generate", "x", "--top-k", "5.5"], "--top-k is '5.5'; it must be a whole number"),
        (["generate", "x", "--stop-token-ids", "1,b"], "--stop-token-ids is '1,b'; it must be"),
        (["generate", "x", "--allowed-token-ids", "6144"], "allowed_token_ids holds 6144"),
        (["generate", "x", "--logit-bias", "{"], "--logit-bias is '{'; it must be an object"),
        (["generate", "x", "--logprobs", "2"], "--logprobs would not be shown; pass --json too"),
        (["generate", "x", "--max-tokens", "99999999"], "max_tokens is 99999999; the prompt has"),
        (["generate", ""], "prompt is empty"),
        (["generate", "x", "--executor", "cloud"], "executor is 'cloud'; it must be one of ray, inline"),
        (
            ["generate", "x", "--server", "h:1", "-tp", "2"],
            "--tensor-parallel-size would configure an engine",
        ),
        (["generate", "x", "--server", ""], "server is ''; it must be HOST:PORT of a running server"),
        (["status", "--server", " "], "server is ' '; it must be HOST:PORT of a running server"),
        (["status", "--server", "x:y"], "server is 'x:y'; it must be HOST:PORT of a running server"),
        (["status", "--server", "localhost"], "server is 'localhost'; it must be HOST:PORT"),
        (["status", "--server", "localhost:65536"], "it must be HOST:PORT"),
        (["batch", "-i", "/nope.jsonl", "-o", "-", "--executor", "cloud"], "executor is 'cloud'"),
        (["batch", "-i", "/nope.jsonl", "-o", "-"], "--input /nope.jsonl cannot be read"),
    ],
)
def test_a_mistake_is_a_message_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], argv: list[str], words: str
) -> None:
    assert run(*argv) == 2
    captured = capsys.readouterr()
    assert words in " ".join(captured.err.split())
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_an_unreachable_server_is_exit_code_4(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("status", "--server", "127.0.0.1:1") == 4
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_an_internal_fault_is_exit_code_5(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("cluster.cli.config.effective_settings", broken)
    assert run("config", "show") == 5
    assert "ZeroDivisionError: boom" in capsys.readouterr().err


def test_generate_without_a_prompt_says_how(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", type("Terminal", (io.StringIO,), {"isatty": lambda _: True})())
    assert run("generate") == 2
    assert "no prompt" in capsys.readouterr().err


@pytest.mark.parametrize("argv", [["version"], ["--version"]])
def test_the_version(capsys: pytest.CaptureFixture[str], argv: list[str]) -> None:
    assert run(*argv) == 0
    assert capsys.readouterr().out.strip() == __version__


def test_doctor_tells_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    code = run("doctor", "--json", "--port", "0", "--kv-cache-memory-bytes", "1M")
    checks = {check["name"]: check for check in json.loads(capsys.readouterr().out)}
    assert list(checks) == [
        *("python", "packages", "torch", "checkpoint", "backend", "tokenizer", "memory", "shared memory"),
        *("port", "ray"),
    ]
    chosen, native_or_torch, *others = checks["backend"]["detail"].split("; ")
    assert (chosen, native_or_torch) == ("native on cpu", "torch can be used too") or (
        chosen == "torch on cpu" and native_or_torch.startswith("native cannot be used: no C compiler")
    )
    assert others == [
        "triton cannot be used: it computes on cuda, not on cpu",
        "aiter cannot be used: it computes on cuda, not on cpu",
    ]
    assert checks["checkpoint"]["status"] == "ok"
    assert "14.3 M parameters" in checks["checkpoint"]["detail"]
    assert code == (4 if any(check["status"] == "fail" for check in checks.values()) else 0)


def test_doctor_names_what_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--model", "/nope", "--kv-cache-memory-bytes", "9999G", "--port", "0") == 4
    assert "FAIL  checkpoint: no such model path: /nope" in capsys.readouterr().out
    assert run("doctor", "--attention-backend", "aiter", "--port", "0") == 4
    assert (
        "FAIL  backend: attention-backend aiter cannot be used: it computes on cuda"
        in capsys.readouterr().out
    )
    assert run("doctor", "--kv-cache-memory-bytes", "9999G", "--port", "0") == 4
    assert "FAIL  memory: weights 54.5 MiB and KV cache 9.8 TiB" in capsys.readouterr().out


def test_doctor_knows_the_dependencies() -> None:
    """They are listed twice, because a cluster may run latentray uninstalled: the lists must agree."""
    import tomllib

    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {Requirement(text).name for text in project["dependencies"]} == set(doctor.DISTRIBUTIONS)


def test_answers_are_printed_in_order_while_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    done: Any = object()
    printer = AnswerPrinter(separated=True)
    printer(1, "second ", None)
    printer(0, "first ", None)
    assert capsys.readouterr().out == "first "
    printer(1, "ends", done)
    assert capsys.readouterr().out == ""
    printer(0, "ends", done)
    assert capsys.readouterr().out == "ends\n\nsecond ends\n\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_at_a_terminal_and_few_in_a_log() -> None:
    log, terminal = io.StringIO(), Terminal()
    for stream in (log, terminal):
        line = ProgressLine(stream)
        for message in (
            "A (0 s)",
            "A (1 s)",
            "B (0 s): 2 bundles",
            "B (1 s): 2 bundles",
            "B (1 s): 3 bundles",
        ):
            line(f"waiting for {message}")
        line.close()
    assert [text.split("] ")[1] for text in log.getvalue().splitlines()] == [
        "waiting for A (0 s)",
        "waiting for B (0 s): 2 bundles",
        "waiting for B (1 s): 3 bundles",
    ]
    assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().count("\r") == 6
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize("columns", [20, 80])
def test_progress_is_cut_to_the_width(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    terminal = Terminal()
    ProgressLine(terminal)("waiting for 漢字漢字漢字漢字漢字\n" * 9)
    [shown] = terminal.getvalue().split("\r\x1b[K")[1:]
    assert "\n" not in shown
    wide = sum(character in "漢字" for character in shown)
    assert columns - 3 <= len(shown) + wide < columns


def test_help_stands_in_sections_and_summaries_are_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("serve", "--help") == 0
    lines = capsys.readouterr().out.splitlines()
    groups = list(dict.fromkeys(setting.group for setting in declared(ServeArgs).values()))
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == [
        "Options:",
        *(f"{group}:" for group in groups),
    ]
    assert run("--help") == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "..." not in text.replace("[ARGS]...", "")
    assert "Start a small local server, stream two answers over gRPC, print what they cost, stop." in text
    assert "--install-completion" in text


@pytest.mark.parametrize("name", ["tp", "trust_remote_code"])
def test_names_of_other_engines_are_explained_in_every_source(tmp_path: Path, name: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(f"{name.replace('_', '-')}: 2\n")
    for source in (
        {"given": {name: 2}, "environ": {}},
        {"config_file": file, "environ": {}},
        {"environ": {f"LATENTRAY_{name.upper()}": "2"}},
    ):
        with pytest.raises(ConfigError, match=f"there is no {name}: "):
            load_settings(EngineArgs, **source)


def test_the_page_on_settings_is_written_from_their_declarations() -> None:
    written = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    assert written == settings_page(), "run: python -m cluster.config.reference > docs/settings.md"
    codes = [code for name, code in vars(errors).items() if name.startswith("EXIT_") and name != "EXIT_CODES"]
    assert codes == list(errors.EXIT_CODES)
    for setting in declared(ServeArgs).values():
        assert f"`{setting.variable}`" in written


@pytest.mark.parametrize(
    "command",
    [
        ("generate", "x"),
        ("generate", "x", "--executor", "ray"),
        ("serve", "--port", "0", "--http-port", "0"),
    ],
)
def test_too_little_memory_is_told_before_anything_starts(
    command: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for door in ("actors.inline_group.InlineGroup", "cluster.launch.group.launch_group"):
        monkeypatch.setattr(door, lambda *args, **more: pytest.fail("it was started"))
    monkeypatch.setattr("cluster.launch.serving.launch_groups", lambda *args, **more: pytest.fail("started"))
    assert run(*command, "--kv-cache-memory-bytes", "9999G") == 4
    assert "the memory does not suffice: weights 54.5 MiB and KV cache 9.8 TiB" in capsys.readouterr().err


def test_memory_of_other_machines_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings(EngineArgs, {"kv_cache_memory_bytes": "9999G"}, environ={})
    config = resolve(settings.args)
    assert [memory_check(config, address)[0] for address in (None, "local", "auto")] == [False, False, True]
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert memory_check(config, None)[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tp", "use tensor_parallel_size"),
        ("disable_radix_cache", "use enable_prefix_caching=False"),
        ("mem_fraction_static", "use gpu_memory_utilization on a GPU, kv_cache_memory_bytes on a CPU"),
    ],
)
def test_keywords_of_other_engines_are_explained_in_python(name: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings(EngineArgs, {name: 1}, environ={})
    assert str(caught.value) == f"there is no {name}: {words}"


def test_every_parameter_is_in_the_page_on_sampling() -> None:
    page = (ROOT / "docs" / "sampling.md").read_text(encoding="utf-8")
    table = page[page.index("| parameter |") :].split("\n\n")[0]
    assert [name for name in PARAMETERS if f"`{name}`" not in table] == []


@pytest.mark.slow
def test_serve_refuses_one_port_for_two_servers_before_it_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags, told in (
            (
                ("--port", "1", "--http-port", "1"),
                "--port and --http-port are both 1; pass another --http-port",
            ),
            (
                ("--port", "0", "--http-port", str(port)),
                "is in use; stop the server that has it, or pass another --http-port",
            ),
            (
                ("--port", "0", "--http-port", "none", "--metrics-port", str(port)),
                "or pass another --metrics-port",
            ),
        ):
            assert run("serve", *flags, "--kv-cache-memory-bytes", "60T") == 2
            assert told in capsys.readouterr().err
            run("doctor", *flags)
            assert told in capsys.readouterr().out


@pytest.mark.slow
def test_an_output_that_takes_no_more_is_no_fault_of_ours() -> None:
    command = [sys.executable, "-m", "cluster", "config", "show"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert (done.returncode, "Traceback" in done.stderr) == (4, False), done.stderr
    assert "the output takes no more: No space left on device" in done.stderr
    read, write_end = os.pipe()
    os.close(read)
    closed = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    os.close(write_end)
    assert (closed.returncode, "Traceback" in closed.stderr) == (4, False), closed.stderr


def test_status_tells_of_a_batch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    journal = tmp_path / "o.jsonl.journal"
    records = (
        {"journal": 1, "settings": {}},
        {"run": 2, "at": 1.0, "rows": 400, "done": 10},
        {"custom_id": "a", "run": 2, "at": 2.0, "rows": 400, "done": 11, "num_failed": 3},
    )
    journal.write_text("".join(json.dumps(record) + "\n" for record in records) + '{"custom_id": "to')
    for name in ("o.jsonl", "o.jsonl.journal"):
        with pytest.raises(SystemExit) as ended:
            main(["status", "--batch", str(tmp_path / name)])
        assert ended.value.code == 0
        shown = capsys.readouterr().out
        assert "interrupted" in shown
        assert "11 of 400, 3 failed" in shown
    with pytest.raises(SystemExit) as ended:
        main(["status", "--batch", str(tmp_path / "none")])
    assert ended.value.code == 2
    assert "none.journal cannot be read: No such file" in capsys.readouterr().err
