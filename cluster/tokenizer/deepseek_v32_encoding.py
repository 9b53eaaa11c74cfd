"""DeepSeek-V3.2's form of a chat. Its checkpoint ships an encoder instead of a template.

Source: deepseek-ai/DeepSeek-V3.2, folder encoding (MIT licence): its README and its test vectors. The wording
of the blocks about tools and response formats is part of the form: the model was trained on it.

    <bos>SYSTEM<｜User｜>TEXT<｜Assistant｜></think>ANSWER<eos><｜User｜>TEXT<｜Assistant｜><think>

The answer begins with <think> where the model shall think, else with </think>. Thoughts are shown to the
model only for answers after the last message of a user.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cluster.chat.values import checked_tool_calls, tool_arguments
from kernels_integration.errors import InvalidRequestError, shown

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
DSML = "｜DSML｜"
MARKS = BOS + EOS + USER + ASSISTANT + THINK + END_THINK + DSML

_TOOLS = f"""## Tools

You have access to a set of tools you can use to answer the user's question.
You can invoke functions by writing a "<{DSML}function_calls>" block like the following as part of your \
reply to the user:
<{DSML}function_calls>
<{DSML}invoke name="$FUNCTION_NAME">
<{DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{DSML}parameter>
...
</{DSML}invoke>
<{DSML}invoke name="$FUNCTION_NAME2">
...
</{DSML}invoke>
</{DSML}function_calls>

String and scalar parameters should be specified as is without any escaping or quotes, while lists and \
objects should use JSON format. The "string" attribute should be set to "true" for string type parameters \
and "false" for other types (numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a \
thinking block. Here is an example:

<{DSML}function_calls>
...
</{DSML}function_calls>

<function_results>
...
</function_results>

{THINK}...thinking about results{END_THINK}

Here are the functions available in JSONSchema format:
<functions>
"""
_RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_DEVELOPER = "\n\n# The user's message is: "


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekV32Encoding:
    """How one chat is written.

    thinking: the next answer begins with thoughts. drop_thinking: with thinking, messages of a developer
    before the last user's are left out, as DeepSeek's encoder does with the thoughts of a finished turn.
    add_generation_prompt: after a message of a user or of tools the assistant's turn is opened.
    """

    thinking: bool = False
    drop_thinking: bool = True
    add_generation_prompt: bool = True

    def encode(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]] | None = None
    ) -> str:
        """The prompt, from <｜begin▁of▁sentence｜> on.

        messages: as `checked_messages` returns them. A system's or developer's message may hold tools and
        response_format. tools: of the whole chat; they join a system or developer message that comes first.
        Errors: InvalidRequestError naming the message.
        """
        chat = [dict(message) | {"index": index} for index, message in enumerate(messages)]
        if tools:
            if not chat or chat[0]["role"] not in ("system", "developer"):
                chat.insert(0, {"role": "system", "content": "", "index": 0})
            chat[0]["tools"] = tools
        last_user = _last_user(chat)
        if self.thinking and self.drop_thinking:
            chat = [m for i, m in enumerate(chat) if m["role"] != "developer" or i >= last_user]
            last_user = _last_user(chat)
        parts = [BOS]
        num_results = 0
        """Of the tools that the last answer called."""
        calls: list[Mapping[str, Any]] = []
        for position, message in enumerate(chat):
            role, index = message["role"], message["index"]
            opened = self._opener(position, last_user, is_last=position == len(chat) - 1)
            if role == "tool":
                num_results += 1
                _check_result(index, num_results, calls)
                parts.append(_result(message, num_results))
                if num_results == len(calls):
                    parts.append("\n</function_results>" + (f"\n\n{opened}" if opened else ""))
                continue
            if 0 < num_results < len(calls):
                raise _missing_results(index, num_results, calls)
            num_results = 0
            calls = checked_tool_calls(index, message) if role == "assistant" else []
            match role:
                case "system":
                    parts.append(_text(message) + _blocks(index, message))
                case "developer":
                    text = f"{_blocks(index, message)}{_DEVELOPER}{_developer_text(index, message)}"
                    parts.append(USER + text + (ASSISTANT + opened if opened else ""))
                case "user":
                    parts.append(USER + _text(message) + (ASSISTANT + opened if opened else ""))
                case "assistant":
                    shows_thoughts = self.thinking and position > last_user
                    parts.append(_answer(index, message, calls, shows_thoughts=shows_thoughts))
        if 0 < num_results < len(calls):
            raise _missing_results(len(messages), num_results, calls)
        return "".join(parts)

    def _opener(self, position: int, last_user: int, *, is_last: bool) -> str:
        """What an answer begins with after this message; nothing where none shall be begun."""
        if is_last and not self.add_generation_prompt:
            return ""
        return THINK if self.thinking and position >= last_user else END_THINK


def _last_user(chat: Sequence[Mapping[str, Any]]) -> int:
    """Position of the last message of a user or developer, or -1."""
    return max((i for i, m in enumerate(chat) if m["role"] in ("user", "developer")), default=-1)


def _text(message: Mapping[str, Any]) -> str:
    return message.get("content") or ""


def _developer_text(index: int, message: Mapping[str, Any]) -> str:
    if text := _text(message):
        return text
    field = f"messages[{index}].content"
    raise InvalidRequestError(f"{field} is empty; a developer's message must hold text", field=field)


def _blocks(index: int, message: Mapping[str, Any]) -> str:
    """Tools and response format of a system's or developer's message."""
    text = ""
    if tools := message.get("tools"):
        schemas = [json.dumps(_function(index, tool), ensure_ascii=False) for tool in tools]
        text += "\n\n" + _TOOLS + "\n".join(schemas) + "\n</functions>\n"
    if schema := message.get("response_format"):
        text += "\n\n" + _RESPONSE_FORMAT + json.dumps(schema, ensure_ascii=False)
    return text


def _function(index: int, tool: object) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if isinstance(function, Mapping):
        return function
    raise InvalidRequestError(
        f"tools of messages[{index}] hold {shown(tool)}; each must be an object of type function "
        "with a function",
        field="tools",
    )


def _answer(
    index: int, message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], *, shows_thoughts: bool
) -> str:
    text = _text(message)
    if shows_thoughts:
        thoughts = message.get("reasoning_content") or message.get("reasoning") or ""
        if not thoughts and not calls:
            field = f"messages[{index}].reasoning_content"
            raise InvalidRequestError(
                f"{field} is missing; with thinking, an answer after the last user's message must hold "
                "reasoning_content or tool_calls",
                field=field,
            )
        text = thoughts + END_THINK + text
    if calls:
        invokes = [_invoke(call, f"messages[{index}].tool_calls[{i}]") for i, call in enumerate(calls)]
        text += f"\n\n<{DSML}function_calls>\n" + "\n".join(invokes) + f"\n</{DSML}function_calls>"
    elif message.get("prefix"):
        return text  # the model goes on with this answer
    return text + EOS


def _invoke(call: Mapping[str, Any], field: str) -> str:
    parameters = [
        f'<{DSML}parameter name="{name}" string="{"true" if isinstance(value, str) else "false"}">'
        f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}</{DSML}parameter>"
        for name, value in tool_arguments(call, field).items()
    ]
    name = call["function"]["name"]
    return f'<{DSML}invoke name="{name}">\n' + "\n".join(parameters) + f"\n</{DSML}invoke>"


def _result(message: Mapping[str, Any], number: int) -> str:
    opened = "\n\n<function_results>" if number == 1 else ""
    return f"{opened}\n<result>{_text(message)}</result>"


def _check_result(index: int, number: int, calls: Sequence[Mapping[str, Any]]) -> None:
    if number > len(calls):
        raise InvalidRequestError(
            f"messages[{index}] is result {number} of the {len(calls)} tools that the assistant called "
            "before it; results must follow an assistant's message, one for each tool call, in their order",
            field=f"messages[{index}]",
        )


def _missing_results(index: int, number: int, calls: Sequence[Mapping[str, Any]]) -> InvalidRequestError:
    return InvalidRequestError(
        f"before messages[{index}] there are {number} results for {len(calls)} tool_calls; there must be one "
        "for each, in their order",
        field="messages",
    )
