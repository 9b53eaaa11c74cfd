"""litellm and langchain-openai against a server, run by a Python that has them: URL in, JSON out.

Of chats with a tool: `python client_programs.py litellm|langchain URL`.
"""

import json
import sys
from typing import Any

ASK = "How is the weather in Oslo?"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def litellm(url: str) -> dict[str, Any]:
    import litellm  # type: ignore[import-not-found]

    asked = {"model": "openai/tiny", "api_base": url, "api_key": "none", "tools": [TOOL], "num_retries": 0}
    messages = [{"role": "user", "content": ASK}]
    whole = litellm.completion(messages=messages, **asked)
    chunks = list(litellm.completion(messages=messages, stream=True, **asked))
    streamed = litellm.stream_chunk_builder(chunks)
    return {name: _of_litellm(answer) for name, answer in (("whole", whole), ("streamed", streamed))}


def _of_litellm(answer: Any) -> dict[str, Any]:
    message = answer.choices[0].message
    return {
        "content": message.content,
        "reasoning": message.reasoning_content,
        "calls": [[call.function.name, json.loads(call.function.arguments)] for call in message.tool_calls],
        "finish": answer.choices[0].finish_reason,
    }


def langchain(url: str) -> dict[str, Any]:
    from langchain_openai import ChatOpenAI  # type: ignore[import-not-found]

    model = ChatOpenAI(model="tiny", base_url=url, api_key="none", max_retries=0, stream_usage=True)
    model = model.bind_tools([TOOL])
    whole = model.invoke(ASK)
    streamed = None
    for chunk in model.stream(ASK):
        streamed = chunk if streamed is None else streamed + chunk
    return {name: _of_langchain(message) for name, message in (("whole", whole), ("streamed", streamed))}


def _of_langchain(message: Any) -> dict[str, Any]:
    return {
        "content": message.content,
        "calls": [[call["name"], call["args"]] for call in message.tool_calls],
        "finish": message.response_metadata["finish_reason"],
        "tokens": message.usage_metadata["total_tokens"],
    }


if __name__ == "__main__":
    print(json.dumps({"litellm": litellm, "langchain": langchain}[sys.argv[1]](sys.argv[2])))
