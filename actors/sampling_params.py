"""Sampling parameters of a request, spelled as in vLLM: each declared once, with all that follows from it.

What a row says is the whole declaration: the checks here, the gRPC messages, OpenAI bodies, flags of
`generate` and what the shards get are derived. Illegal values are refused, never clamped.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Annotated, Any, get_type_hints

import msgspec

from actors.parameter_kinds import Kind, Number, Switch, Texts, TokenIds, TokenValues, WholeNumber
from actors.structured_outputs import OneConstraint, StructuredOutputs
from kernels_integration.errors import InvalidRequestError, shown

ALL_LOGPROBS = -1
"""A number of alternatives: the whole vocabulary."""
DEFAULT_MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOP_LENGTH = 1024
MAX_TOKEN_IDS = 4096
"""Of stop_token_ids and logit_bias: they are looked at for every token."""
MAX_VOCABULARY = 2**18
"""More token ids than any vocabulary has."""
MIN_REPETITION_PENALTY = 0.01
"""Below, logits divided by it leave float32's range and tie there."""


class Wire(Enum):
    """How a parameter travels in the SamplingParams message of the gRPC protocol."""

    FIELD = "a field of its name"
    ZERO_IS_UNSET = "a field of its name, of which 0 means the default"
    CONSTRAINT = "the oneof `constraint`"
    NONE = "no field: refused over gRPC"
    CLIENT = "not at all: what it asks for is done by the client"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """The declaration of one parameter, beside its type and default."""

    kind: Kind
    """Which values are legal."""
    help: str
    none: str | None = None
    """What None means, where None is legal."""
    wire: Wire = Wire.FIELD
    openai: bool = True
    """Whether OpenAI's endpoints have it; False: they spell it in their own way, or not at all."""
    flag: bool = True
    """Whether `generate` has a flag of its name."""
    short: str | None = None
    """Second spelling of the flag."""
    from_checkpoint: bool = False
    """Whether generation_config.json may set its default, as in vLLM."""

    name: str = ""
    """Like `default`: filled in from the field, in PARAMETERS."""
    default: Any = None

    @property
    def rule(self) -> str:
        return self.kind.rule + (f", or left out for {self.none}" if self.none else "")

    def checked(self, value: Any) -> Any:
        """The legal value in its one form. Errors: InvalidRequestError: name, value, rule."""
        if value is self.default or (value is None and self.none):
            return value
        return self._accepted(value, self.name, self.rule)

    def parsed(self, text: Any, *, flag: str) -> Any:
        """What the text of a flag means. Errors: InvalidRequestError: flag, value, rule."""
        return self._accepted(self.kind.from_flag(text), flag, self.kind.rule)

    def _accepted(self, value: Any, name: str, rule: str) -> Any:
        try:
            return self.kind.accept(value)
        except ValueError as error:
            what = f"holds {error}" if error.args else f"is {shown(value)}"
            raise InvalidRequestError(f"{name} {what}; it must be {rule}", field=self.name) from None


_COUNT_OF_BEST = WholeNumber(ALL_LOGPROBS, words="a whole number >= 0, or -1 for the whole vocabulary")


class ShardParams(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that shards draw by, in the words of the request."""

    temperature: Annotated[
        float,
        Parameter(
            kind=Number(0, 100, low_is="greedy"),
            help="Logits are divided by it.",
            from_checkpoint=True,
        ),
    ] = 1.0
    top_k: Annotated[
        int,
        Parameter(
            kind=WholeNumber(
                -1, words="a whole number from 1 to 2**63 - 1, or 0 or -1 for all tokens", same={-1: 0}
            ),
            help="Draw from as many best tokens.",
            from_checkpoint=True,
        ),
    ] = 0
    top_p: Annotated[
        float,
        Parameter(
            kind=Number(0, 1, off=1, above_low=True),
            help="Draw from the best tokens that together have this probability.",
            wire=Wire.ZERO_IS_UNSET,
            from_checkpoint=True,
        ),
    ] = 1.0
    min_p: Annotated[
        float,
        Parameter(
            kind=Number(0, 1, off=0),
            help="Draw from tokens with at least this share of the best one's probability.",
            from_checkpoint=True,
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float,
        Parameter(
            kind=Number(-2, 2, off=0), help="Subtracted once from logits of tokens that the completion holds."
        ),
    ] = 0.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            kind=Number(-2, 2, off=0), help="Subtracted for each time that the completion holds the token."
        ),
    ] = 0.0
    repetition_penalty: Annotated[
        float,
        Parameter(
            kind=Number(MIN_REPETITION_PENALTY, 100, off=1),
            help="Positive logits of tokens of prompt and completion are divided by it, others multiplied.",
            wire=Wire.ZERO_IS_UNSET,
            from_checkpoint=True,
        ),
    ] = 1.0
    logit_bias: Annotated[
        dict[int, float] | None,
        Parameter(
            kind=TokenValues(max_count=MAX_TOKEN_IDS, low=-100, high=100),
            help='Added to logits of tokens: {"TOKEN ID": NUMBER}.',
            none="none",
        ),
    ] = None
    allowed_token_ids: Annotated[
        tuple[int, ...] | None,
        Parameter(
            kind=TokenIds(min_count=1, max_count=MAX_VOCABULARY),
            help="Nothing else is drawn.",
            none="all",
            wire=Wire.NONE,
        ),
    ] = None
    structured_outputs: Annotated[
        StructuredOutputs | None,
        Parameter(
            kind=OneConstraint(),
            help='What the text must look like: {"json": SCHEMA}, {"regex": "..."}, {"choice": [...]}.',
            none="free text",
            wire=Wire.CONSTRAINT,
        ),
    ] = None
    min_tokens: Annotated[int, Parameter(kind=WholeNumber(0), help="No end before as many tokens.")] = 0
    logprobs: Annotated[
        int | None,
        Parameter(
            kind=_COUNT_OF_BEST,
            help="Report log probabilities of the completion's tokens and of as many best alternatives.",
            none="none",
            openai=False,
        ),
    ] = None
    prompt_logprobs: Annotated[
        int | None,
        Parameter(kind=_COUNT_OF_BEST, help="The same of the prompt's tokens but the first.", none="none"),
    ] = None


class SamplingParams(ShardParams, frozen=True, kw_only=True):
    """How to draw a completion. docs/sampling.md tells the order in which the filters apply.

    Each field says what it means and what is legal.
    Errors: InvalidRequestError naming field, value and legal values.
    """

    n: Annotated[
        int,
        Parameter(
            kind=WholeNumber(1, MAX_CHOICES),
            help="Completions of each prompt; the first is the one that n = 1 gives.",
            wire=Wire.ZERO_IS_UNSET,
            short="-n",
        ),
    ] = 1
    bad_words: Annotated[
        tuple[str, ...],
        Parameter(
            kind=Texts(max_count=1024, max_length=1024, max_total=2**15, may_be_blank=False),
            help="Texts of which the completion does not get the last token.",
            wire=Wire.NONE,
        ),
    ] = ()
    seed: Annotated[
        int | None,
        Parameter(
            kind=WholeNumber(-(2**63), 2**64 - 1, words="a whole number of 64 bits"),
            help="Makes the completion repeatable.",
            none="one that is drawn",
            flag=False,  # --seed of the engine
        ),
    ] = None
    max_tokens: Annotated[
        int | None,
        Parameter(
            kind=WholeNumber(1, words="a whole number >= 1 (below 2**63)"),
            help="Length of the completion, at most; prompt and completion must fit into the context.",
            none="as many as the context holds",
        ),
    ] = 16
    stop: Annotated[
        tuple[str, ...],
        Parameter(
            kind=Texts(
                max_count=16, max_length=MAX_STOP_LENGTH, max_total=16 * MAX_STOP_LENGTH, may_be_blank=True
            ),
            help="End the text before one of these.",
        ),
    ] = ()
    stop_token_ids: Annotated[
        tuple[int, ...],
        Parameter(
            kind=TokenIds(max_count=MAX_TOKEN_IDS), help="End the completion with one of these tokens."
        ),
    ] = ()
    include_stop_str_in_output: Annotated[
        bool, Parameter(kind=Switch(), help="Keep the stop string, or the token, that ended the text.")
    ] = False
    ignore_eos: Annotated[
        bool, Parameter(kind=Switch(), help="Go on behind an end of text, to --max-tokens.")
    ] = False
    skip_special_tokens: Annotated[
        bool, Parameter(kind=Switch(), help="Leave special tokens out of the text.")
    ] = True
    detokenize: Annotated[
        bool,
        Parameter(
            kind=Switch(),
            help="Make text; without it there are only token ids.",
            wire=Wire.CLIENT,
            openai=False,
            flag=False,
        ),
    ] = True

    def __post_init__(self) -> None:
        for name, parameter in PARAMETERS.items():
            value = getattr(self, name)
            checked = parameter.checked(value)
            if checked is not value:
                msgspec.structs.force_setattr(self, name, checked)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}; it must be {PARAMETERS['min_tokens'].rule}, at most "
                f"max_tokens {self.max_tokens}",
                field="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                f"stop is {shown(self.stop)}; it must be empty without detokenize, since stop strings are "
                "sought in the text",
                field="stop",
            )


def _declared() -> Mapping[str, Parameter]:
    hints = get_type_hints(SamplingParams, include_extras=True)
    defaults = zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
    return MappingProxyType(
        {name: replace(hints[name].__metadata__[0], name=name, default=default) for name, default in defaults}
    )


PARAMETERS = _declared()
"""Every parameter's declaration, by its name."""
TOKEN_ID_PARAMETERS = tuple(
    name for name, row in PARAMETERS.items() if isinstance(row.kind, TokenIds | TokenValues)
)
"""Those whose entries must be tokens of the vocabulary, which only a front end knows."""
