"""Constraints to compiled grammars over one model's vocabulary: what front ends try and shards use.

What a grammar's parse needs is made at once; the masks of its states are made when a state is first met, so
compiling takes about a millisecond and a step never waits for masks that nobody asks for.
"""

import json
import logging
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from actors.grammar.matcher import SequenceMatcher
from actors.structured_outputs import StructuredOutputs
from actors.token_text import bytes_of, decoder_kinds

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

CACHE_BYTES = 2**28
"""Of compiled grammars that nobody uses, and as many of xgrammar's own parts of them."""
MAX_WHITESPACE = 20
"""Characters in a row between the parts of JSON: a model may indent, and may not do it for ever."""


class GrammarCompiler:
    """Compiles constraints for one vocabulary, each once while it is in use or lately was. Not thread-safe.

    The first one takes seconds: xgrammar is imported and the vocabulary read.
    """

    def __init__(self, model_path: str | Path, vocab_size: int) -> None:
        self._tokenizer_file = Path(model_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutputs, xgrammar.CompiledGrammar] = OrderedDict()
        """The last used one stands last."""

    def matcher(self, constraint: StructuredOutputs, end_token_ids: tuple[int, ...]) -> SequenceMatcher:
        """A sequence at its beginning. Errors: as `compile`."""
        import xgrammar

        compiled = self.compile(constraint)
        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(end_token_ids))
        return SequenceMatcher(matcher, end_token_ids=end_token_ids, vocab_size=self._vocab_size)

    def compile(self, constraint: StructuredOutputs) -> "xgrammar.CompiledGrammar":
        """Errors: RuntimeError in xgrammar's words; ImportError without xgrammar."""
        found = self._compiled.get(constraint)
        if found is None:
            found = self._compile(constraint)
            self._compiled[constraint] = found
        self._compiled.move_to_end(constraint)
        while len(self._compiled) > 1 and self._num_bytes() > CACHE_BYTES:
            self._compiled.popitem(last=False)
        return found

    def _num_bytes(self) -> int:
        """They grow while their masks are made."""
        return sum(compiled.memory_size_bytes for compiled in self._compiled.values())

    def _compile(self, constraint: StructuredOutputs) -> "xgrammar.CompiledGrammar":
        text = constraint.text
        match constraint.kind:
            case "json":
                return self._compile_schema(text)
            case "json_object":
                return self._compile_schema('{"type":"object"}')
            case "regex":
                return self._backend.compile_regex(text)
            case "grammar":
                return self._backend.compile_grammar(text)
            case "choice":
                return self._backend.compile_structural_tag(_one_of(json.loads(text)))
            case "structural_tag":
                return self._backend.compile_structural_tag(text)

    def _compile_schema(self, schema: str) -> "xgrammar.CompiledGrammar":
        return self._backend.compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)

    @cached_property
    def _backend(self) -> "xgrammar.GrammarCompiler":
        import xgrammar

        tokenizer = Tokenizer.from_file(str(self._tokenizer_file))
        info = xgrammar.TokenizerInfo(
            _vocabulary(tokenizer, self._vocab_size),
            xgrammar.VocabType.RAW,
            vocab_size=self._vocab_size,
            stop_token_ids=[],  # each matcher has its request's
        )
        return xgrammar.GrammarCompiler(
            info, max_threads=1, cache_limit_bytes=CACHE_BYTES, enable_dynamic_compilation=True
        )


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> list[bytes]:
    """What each token adds to the text. Special tokens and unknown ids add nothing: never legal."""
    kinds = decoder_kinds(tokenizer)
    special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    return [b"" if i in special else bytes_of(tokenizer, kinds, i) for i in range(vocab_size)]


def _one_of(texts: list[str]) -> str:
    elements = [{"type": "const_string", "value": text} for text in texts]
    return json.dumps({"type": "structural_tag", "format": {"type": "or", "elements": elements}})
