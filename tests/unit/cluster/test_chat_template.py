"""Chat templates against transformers, and what a template may not do."""

import gc
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from cluster.chat.messages import checked_messages, checked_tools
from cluster.chat.process import RenderLimits, TemplateProcess
from cluster.config import BUNDLED_CHECKPOINT
from cluster.tokenizer import ChatTemplate
from kernels_integration.errors import CheckpointError, InvalidRequestError

TEMPLATES = Path(__file__).parent / "templates"
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}


@pytest.fixture(scope="module")
def reference() -> Any:
    return AutoTokenizer.from_pretrained(BUNDLED_CHECKPOINT)


PROCESS = TemplateProcess()
NARROW = TemplateProcess(RenderLimits(seconds=0.5, memory_bytes=2**28))


def render(source: str, chat: Any, **kwargs: Any) -> str:
    template = ChatTemplate(source, process=PROCESS)
    return template.render(checked_messages(chat), special_tokens=SPECIAL, **kwargs)


def prompt_of(source: str, chat: Any, **variables: Any) -> str:
    """The prompt of a template that may leave messages out."""
    known = {"tools": None, "add_generation_prompt": True, "documents": None}
    return PROCESS.render(source, checked_messages(chat), SPECIAL | known | variables).prompt


USER = {"role": "user", "content": "  What? <|eos|> {{ 1 }}\n"}
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [
        {"role": "system", "content": "Be brief.\n"},
        USER,
        {"role": "assistant", "content": "This."},
        {"role": "user", "content": "東京 🙂"},
    ],
]

# The dialect: blocks on lines of their own, loop controls, namespaces, tojson with arguments, special tokens,
# extra variables, tools, the generation mark, macros, recursion, captured blocks, the operator ~.
DIALECT = """
{%- set ns = namespace(found=false) %}
{{ bos_token }}
{%- macro shout(text) -%}{{ (text | upper) ~ '!' ~ loop_count }}{%- endmacro -%}
{%- set loop_count = messages | length %}
{%- for m in messages %}
    {%- if m.role == 'system' %}{% set ns.found = true %}{% continue %}{% endif %}
  {% if loop.last and stop_at_last is defined %}{% break %}{% endif %}
[{{ shout(m['role']) }}] {{ m.content | trim }}{% generation %} said {{ ns.found }}{% endgeneration %}
{%- endfor %}
{%- set captured %}
{%- for m in messages if m.role != 'system' %}{{ loop.index }}{% else %}-{% endfor %}{% endset %}
{{ captured * 2 + '%03d' % 7 }}
{%- for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is sequence else x }};{% endfor %}
{{ tools | tojson(indent=2) if tools else 'no tools' }}
{{ {'b': '<é&>', 'a': 1} | tojson(sort_keys=true) }} {{ messages | map(attribute='role') | join(',') }}
{%- if add_generation_prompt %} go{% endif %}
"""


@pytest.mark.parametrize(
    "variables", [{}, {"stop_at_last": True}, {"tools": [{"type": "function", "name": "é"}]}]
)
def test_the_dialect_of_templates_is_that_of_transformers(reference: Any, variables: dict[str, Any]) -> None:
    for chat in CHATS:
        expected = reference.apply_chat_template(
            chat, chat_template=DIALECT, add_generation_prompt=True, tokenize=False, **variables
        )
        assert prompt_of(DIALECT, chat, **variables) == expected


# As GLM-4.5 and later: thoughts of past turns left out, arguments of calls looped over, results observed.
GLM = (TEMPLATES / "glm_style.jinja").read_text(encoding="utf-8")

# As DeepSeek-V3: calls marked by tokens, their arguments appended as text, a content that is none.
DEEPSEEK_V3 = (TEMPLATES / "deepseek_v3_style.jinja").read_text(encoding="utf-8")

ARGUMENTS = {"city": "Zürich", "days": 3, "units": ["C", "F"], "why": None}
TEXT = '{"city":"Zürich", "days":3,"units":["C","F"],"why":null}'
"""Not as json.dumps would write it."""
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def tool_loop(arguments: Any, content: str | None = None) -> list[dict[str, Any]]:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    second = call | {"id": "2"}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "<think>old</think>\nWhere?"},
        {"role": "user", "content": "Here"},
        {
            "role": "assistant",
            "content": content,
            "reasoning_content": "look\n",
            "tool_calls": [call, second],
        },
        {"role": "tool", "content": "20 °C", "tool_call_id": "1"},
        {"role": "tool", "content": '{"wind": 1}', "tool_call_id": "2"},
        {"role": "assistant", "content": "Fine.", "reasoning_content": "good"},
    ]


@pytest.mark.parametrize("num_messages", range(1, 9))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("thinking", [None, True, False])
def test_glm_style(
    reference: Any, num_messages: int, add_generation_prompt: bool, thinking: bool | None
) -> None:
    kwargs = {} if thinking is None else {"enable_thinking": thinking}
    expected = reference.apply_chat_template(
        tool_loop(ARGUMENTS, content="")[:num_messages],
        chat_template=GLM,
        tools=TOOLS,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **kwargs,
    )
    assert ("<arg_key>days</arg_key>\n<arg_value>3</arg_value>" in expected) == (num_messages >= 5)
    # Clients send arguments as text, and null for no content; transformers would fail on the one and
    # print "None" for the other.
    for chat in (tool_loop(ARGUMENTS, ""), tool_loop(TEXT, ""), tool_loop(TEXT, None)):
        text = render(
            GLM,
            chat[:num_messages],
            tools=TOOLS,
            add_generation_prompt=add_generation_prompt,
            template_kwargs=kwargs,
        )
        assert text == expected


@pytest.mark.parametrize("num_messages", range(1, 9))
@pytest.mark.parametrize("kwargs", [{}, {"thinking": True}, {"thinking": False}])
def test_deepseek_v3_style(num_messages: int, kwargs: dict[str, Any]) -> None:
    chat = tool_loop(TEXT, None)[:num_messages]
    # apply_chat_template itself would drop a content of None, and this template then fails.
    (expected,), _ = render_jinja_template(
        [chat], chat_template=DEEPSEEK_V3, add_generation_prompt=True, **SPECIAL | kwargs
    )
    assert (f"```json\n{TEXT}\n```" in expected) == (num_messages >= 5)
    assert render(DEEPSEEK_V3, chat, template_kwargs=kwargs) == expected
    as_objects = render(DEEPSEEK_V3, tool_loop(ARGUMENTS)[:num_messages], template_kwargs=kwargs)
    assert as_objects == expected.replace(TEXT, json.dumps(ARGUMENTS, ensure_ascii=False))


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content", "thinking"])
@pytest.mark.parametrize("read", ["thinking", "reasoning_content"])
def test_thoughts_have_all_their_names(reference: Any, name: str, read: str) -> None:
    source = "{% for m in messages %}{{ m." + read + " }}|{% endfor %}"
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", name: "hm"}]
    assert prompt_of(source, chat) == reference.apply_chat_template(
        chat, chat_template=source, tokenize=False
    )


@pytest.mark.parametrize(
    ("calls", "field", "words"),
    [
        ({}, "messages[0].tool_calls", "must be a list"),
        ([3], "messages[0].tool_calls[0]", "whose function has a name"),
        ([{"function": {"arguments": "{}"}}], "messages[0].tool_calls[0]", "whose function has a name"),
        (
            [{"function": {"name": "f", "arguments": "{"}}],
            "messages[0].tool_calls[0].function.arguments",
            "'{'",
        ),
        (
            [{"function": {"name": "f", "arguments": "[1]"}}],
            "messages[0].tool_calls[0].function.arguments",
            "",
        ),
        (
            [{"function": {"name": "f", "arguments": 3}}],
            "messages[0].tool_calls[0].function.arguments",
            "is 3",
        ),
    ],
)
def test_tool_calls_of_another_form_are_refused(calls: Any, field: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render("x", [{"role": "assistant", "content": "", "tool_calls": calls or {"a": 1}}])
    assert caught.value.field == field
    assert words in str(caught.value)


def test_the_date_is_a_function_of_templates() -> None:
    assert ChatTemplate("{{ strftime_now('%Y') }}", process=PROCESS).render([]).startswith("2")


@pytest.mark.parametrize("name", ["messages", "tools", "add_generation_prompt", "no identifier", 3])
def test_arguments_cannot_take_the_place_of_others(name: Any) -> None:
    with pytest.raises(InvalidRequestError, match="chat_template_kwargs holds") as caught:
        render("x", CHATS[0], template_kwargs={name: 1})
    assert caught.value.field == "chat_template_kwargs"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content.foo.bar }}",
        "{{ 1 / 0 }}",
        "{{ 'x' | int + 'y' }}",
        "{{ messages[9].role.x }}",
        "{{ [].pop() }}",
        # the sandbox: no internals, nothing changed
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ (messages | map(attribute='__class__') | first).x }}",
        "{{ '{0.__class__.__mro__}'.format(1) | length + none }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ messages[0].tool_calls[0].function.arguments._text.x }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__.x }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}{{ ns.__class__.x }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        # no end
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(99999) if range(99999) | list | sum < 0 %}{% endfor %}",
        "{% for a in [1] recursive %}{% for b in range(99999) %}{% endfor %}{{ loop([1]) }}{% endfor %}",
        "{% macro count_step() %}{% endmacro %}{% set environment = 1 %}{% for a in range(99999) %}"
        "{% for b in range(99999) %}{% endfor %}{% endfor %}",
        "{% for a in range(100000000) %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(99) }}",
        "{{ ('ab ' * 10000000) | wordwrap(1) }}",
        # no end of memory
        "{{ 'x' * 10**10 }}",
        "{{ 10**10 * 'x' }}",
        "{{ ([1] * 10**9) | length }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ 2 ** 100000 }}",
        "{{ '%0999999999d' % 1 }}",
        "{{ '%*d' % (999999999, 1) }}",
        "{{ '%(a)600000000s' % {'a': messages[0].role} }}",
        "{{ messages[0].role | center(10000000000) }}",
        "{{ 'x' | center(10000000000) }}",
        "{% autoescape 'x' | center(10000000000) %}{% endautoescape %}{{ 1 / 0 }}",
        "{{ messages[0].role.ljust(10000000000) }}",
        "{{ '{:>10000000000}'.format(messages[0].role) }}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x='xx') %}{% for a in range(99) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}",
        "{% for a in range(90000) %}{{ ' ' * 1000 }}{% endfor %}",
    ],
)
def test_what_a_template_may_not_do_is_an_error(source: str) -> None:
    """Of the checkpoint where it shows already while the template is compiled: Jinja computes constants."""
    started = time.monotonic()
    with pytest.raises((InvalidRequestError, CheckpointError), match="chat template") as caught:
        ChatTemplate(source, process=NARROW).render([{"role": "user", "content": "x"}])
    assert getattr(caught.value, "field", "messages") == "messages"
    assert time.monotonic() - started < 20 * NARROW.limits.seconds
    if "raise_exception('" in source:
        assert "roles must alternate" in str(caught.value)
    # Whatever became of the process, the next request has its answer.
    assert ChatTemplate("{{ messages[0].content }}", process=NARROW).render(CHATS[0]) == "Hi"


@pytest.mark.parametrize(
    "source",
    [
        "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
        "x" * 300_000,
    ],
)
def test_a_template_that_cannot_be_compiled_within_the_limits_is_the_checkpoints_error(source: str) -> None:
    with pytest.raises(CheckpointError, match="the chat template default"):
        ChatTemplate(source, process=NARROW)


def test_a_warm_process_answers_within_milliseconds() -> None:
    """A process for each prompt would take a hundred times as long."""
    template = ChatTemplate(GLM, process=PROCESS)
    render(GLM, CHATS[0])
    started = time.monotonic()
    for _ in range(200):
        template.render(checked_messages(CHATS[0]))
    assert time.monotonic() - started < 4


def test_a_process_that_died_between_two_prompts_is_replaced() -> None:
    process = TemplateProcess()
    template = ChatTemplate("{{ messages[0].content }}", process=process)
    assert template.render(CHATS[0]) == "Hi"
    child = process._child
    assert child is not None
    child.kill()
    child.wait()
    assert template.render(CHATS[0]) == "Hi"


def test_the_process_ends_with_its_tokenizer() -> None:
    process = TemplateProcess()
    ChatTemplate("x", process=process)
    child = process._child
    assert child is not None
    assert child.poll() is None
    del process
    gc.collect()
    assert child.poll() is not None


def test_the_process_ends_with_one_that_is_killed() -> None:
    """Nobody tells it: its input ends."""
    code = (
        "import os, signal; from cluster.chat.process import TemplateProcess; p = TemplateProcess(); "
        "p.check('x'); print(p._child.pid, flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL
    deadline_s = time.monotonic() + 30
    while Path(f"/proc/{int(done.stdout)}/stat").exists():
        state = Path(f"/proc/{int(done.stdout)}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # nobody collects orphans where this runs as the first process
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_arguments_that_are_no_plain_data_are_named() -> None:
    with pytest.raises(InvalidRequestError, match="must be plain data, as JSON has it"):
        render("{{ messages[0].content }}{{ x }}", CHATS[0], template_kwargs={"x": object()})


def test_long_chats_stay_within_the_bounds() -> None:
    chat = [{"role": "user", "content": "x" * 5000}, {"role": "assistant", "content": "y" * 5000}] * 500
    assert len(render(GLM, chat)) > 5_000_000


ECHO = """{%- for m in messages -%}
{%- if m['role'] == 'user' -%}<|user|>{{ m['content'] }}
{%- elif m['tool_calls'] is defined and m['tool_calls'] is not none -%}<|assistant|>
{%- for call in m['tool_calls'] -%}CALL {{ call['function']['name'] }}{%- endfor -%}END OF CALLS
{%- elif m['role'] in known -%}<|{{ m['role'] }}|>{{ m['content'] }}{%- endif -%}{%- endfor -%}"""
"""With the test that matters of DeepSeek-V3.1's template: tool_calls is defined and is not none."""
NOTHING: tuple[Any, ...] = (None, [], "")


@pytest.mark.parametrize("field", ["tool_calls", "reasoning_content", "name", "refusal", "audio"])
@pytest.mark.parametrize("nothing", NOTHING)
def test_every_spelling_of_nothing_renders_alike(field: str, nothing: Any) -> None:
    source = ECHO + "{% for m in messages %}{{ m.FIELD is defined }}{% endfor %}".replace("FIELD", field)
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    plain = render(source, chat, template_kwargs={"known": ["assistant"]})
    assert plain.startswith("<|user|>Hi<|assistant|>Hello there")
    echoed = [chat[0], chat[1] | {field: nothing}]
    assert render(source, echoed, template_kwargs={"known": ["assistant"]}) == plain


@pytest.mark.parametrize("content", NOTHING)
@pytest.mark.parametrize("source", [GLM, DEEPSEEK_V3, ECHO], ids=["glm", "deepseek_v3", "echo"])
def test_a_message_that_only_calls_tools_renders_alike_however_it_says_so(source: str, content: Any) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    variables = {"template_kwargs": {"known": []} if source == ECHO else {}}
    plain = render(source, chat, **variables)
    assert "f" in plain
    assert render(source, [chat[0], chat[1] | {"content": content}], **variables) == plain


def test_results_are_shown_in_the_order_of_their_calls() -> None:
    """No template writes ids: whose a result is, its place tells."""

    def chat(*results: tuple[str | None, str]) -> list[dict[str, Any]]:
        calls = [
            {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}} for name in "abc"
        ]
        told = [{"role": "tool", "tool_call_id": name, "content": content} for name, content in results]
        return [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": calls}, *told]

    expected = render(GLM, chat(("a", "of a"), ("b", "of b"), ("c", "of c")))
    assert expected.index("of a") < expected.index("of b") < expected.index("of c")
    assert render(GLM, chat(("c", "of c"), ("a", "of a"), ("b", "of b"))) == expected
    assert render(GLM, chat((None, "of a"), (None, "of b"), (None, "of c"))) == expected
    with pytest.raises(InvalidRequestError, match="'a', 'b', 'c'") as caught:
        render(GLM, chat(("a", "of a"), ("z", "of z")))
    assert caught.value.field == "messages[3].tool_call_id"


@pytest.mark.parametrize("nothing", [None, []])
def test_no_tools_are_no_tools(nothing: Any) -> None:
    assert checked_tools(nothing) is None
    tool = {
        "type": "function",
        "function": {"name": "f", "description": None, "parameters": {}, "strict": ""},
    }
    assert checked_tools([tool]) == [{"type": "function", "function": {"name": "f", "parameters": {}}}]


DEVELOPER = [{"role": "developer", "content": "Answer only: BANANA"}, {"role": "user", "content": "Hi"}]


def test_a_developer_is_a_system_to_templates_that_know_none() -> None:
    as_system = [DEVELOPER[0] | {"role": "system"}, DEVELOPER[1]]
    for source in (GLM, DEEPSEEK_V3):
        assert render(source, DEVELOPER) == render(source, as_system)
        assert "BANANA" in render(source, DEVELOPER)
    strict = "{% for m in messages %}{% if m.role == 'developer' %}{{ raise_exception('who?') }}{% endif %}"
    assert "BANANA" in render(strict + "{{ m.content }}{% endfor %}", DEVELOPER)
    knows = {"template_kwargs": {"known": ["developer"]}}
    assert render(ECHO, DEVELOPER, **knows) == "<|developer|>Answer only: BANANA<|user|>Hi"


CALL = {"type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "field", "words"),
    [
        (DEVELOPER[0], "messages[0].content", "messages[0], of role system,"),
        ({"role": "tool", "content": "18 degrees"}, "messages[0].content", "messages[0], of role tool,"),
        ({"role": "system", "content": "Hi"}, "messages[0].content", "messages[0], of role system,"),
        (
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            "messages[0].tool_calls[0]",
            "messages[0].tool_calls[0], of role assistant,",
        ),
    ],
)
def test_a_message_that_the_template_leaves_out_is_refused_by_name(
    message: dict[str, Any], field: str, words: str
) -> None:
    """Also where another message happens to hold the same text."""
    source = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert render(source, [DEVELOPER[1]]) == "Hi"
    with pytest.raises(InvalidRequestError) as caught:
        render(source, [message, DEVELOPER[1]])
    assert caught.value.field == field
    assert str(caught.value).startswith(f"{words} is not in the prompt that the model's chat template makes")


def test_tools_that_the_template_leaves_out_are_refused_by_name() -> None:
    assert "weather" in render(GLM, [DEVELOPER[1]], tools=TOOLS)
    with pytest.raises(InvalidRequestError, match=r"^tools\[0\] is not in the prompt"):
        render(DEEPSEEK_V3, [DEVELOPER[1]], tools=TOOLS)


def test_a_template_that_fails_on_marks_is_judged_by_the_text() -> None:
    """It reads a content as a number."""
    number = "{{ [1][m.content | int(9)] + 1 }}"
    source = "{% for m in messages if m.role == 'user' %}{{ m.content }}" + number + "{% endfor %}"
    assert render(source, [{"role": "user", "content": "0"}]) == "02"
    with pytest.raises(InvalidRequestError, match="of role system, is not in the prompt"):
        render(source, [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "0"}])


def test_a_template_that_takes_too_long_to_compile_is_told_so() -> None:
    """It may be legal Jinja."""
    process = TemplateProcess(RenderLimits(seconds=0.05))
    with pytest.raises(CheckpointError, match=r"default cannot be compiled: it takes more than 0\.05 s"):
        ChatTemplate("{% if a %}" + "{{ a + b * c }}" * 15000 + "{% endif %}", process=process)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", r"nested deeper than \d+ levels; simplify it"),
        ("{{ [1] | list " + "| list " * 3000 + "}}", r"nested deeper than \d+ levels; simplify it"),
    ],
)
def test_a_template_beyond_a_limit_of_compiling_is_told_which(source: str, words: str) -> None:
    with pytest.raises(CheckpointError, match="^the chat template default cannot be compiled: .*" + words):
        ChatTemplate(source)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", r"is nested deeper than \d+ levels"),
        ("{{ 'a' * 2000000000 }}", "takes more memory than the 1073741824 bytes of its process"),
    ],
)
def test_a_rendering_beyond_a_limit_is_told_which(source: str, words: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, [DEVELOPER[1]])
    told = str(caught.value)
    assert told.startswith("the model's chat template failed on these messages: ")
    assert re.search(words + "; shorten them, or give another template by --chat-template FILE$", told)
    assert not re.search("Error|exceeded|None", told)
