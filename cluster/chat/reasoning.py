"""Thoughts before an answer: <think>...</think>, as DeepSeek's and GLM's models write them.

Templates begin the answer by <think> (the model thinks), by </think> or <think></think> (it does not), or by
neither (the model writes <think> itself, or does not).
"""

from cluster.chat.answer_parts import Reasoning
from cluster.chat.incoming import SPACE_BEFORE, Incoming, Pattern, Reader, Space, before, matched

THINK = "<think>"
END_THINK = "</think>"
END_OF_PROMPT = 16
"""Tokens of a prompt in which the beginning of thoughts would stand."""
_BEGIN: Pattern = (Space(), THINK)
_END: Pattern = (Space(), END_THINK)


def opens_thoughts(prompt: str) -> bool:
    """Whether the answer to a prompt begins inside thoughts. prompt: its end is enough."""
    return prompt.rstrip().endswith(THINK)


def thoughts(incoming: Incoming, *, opened: bool) -> Reader[None]:
    """Read the thoughts, if the text begins with any. White space around them is no part of anything.

    opened: the prompt ends with <think>.
    """
    if not opened and (yield from matched(incoming, _BEGIN)) is None:
        return
    yield from _space(incoming)
    if (yield from before(incoming, END_THINK, make=Reasoning, tail=SPACE_BEFORE)):
        yield from matched(incoming, _END)
        yield from _space(incoming)


def _space(incoming: Incoming) -> Reader[None]:
    """Read white space."""
    while not incoming.ended or incoming.text:
        incoming.text = incoming.text.lstrip()
        if incoming.text:
            return
        yield None
