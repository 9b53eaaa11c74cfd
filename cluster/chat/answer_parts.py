"""What an assistant's answer is made of. Readers yield it piece by piece, as the text comes."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Thoughts before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Content:
    """The answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegins:
    """A tool is called; the arguments up to the next call are its."""

    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Of the JSON text of a call's arguments, which is cut where the answer is."""

    text: str


Part = Reasoning | Content | CallBegins | CallArguments
