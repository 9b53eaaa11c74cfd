"""Constraints to compiled grammars over one model's vocabulary: what front ends try and shards use.

What a grammar's parse needs is made at once; the masks of its states are made when a state is first met, so
compiling takes about a millisecond and a step never waits for masks that nobody asks for.
"""

import importlib.util
import json
import logging
import threading
from collections import OrderedDict
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from actors.grammar.matcher import SequenceMatcher
from actors.grammar.xgrammar_module import import_xgrammar
from actors.structured_outputs import StructuredOutputs
from actors.token_text import bytes_of, decoder_kinds

if TYPE_CHECKING:
    import xgrammar

logger = logging.getLogger(__name__)

CACHE_BYTES = 2**28
"""Of compiled grammars that nobody uses, and as many of xgrammar's own parts of them."""
MAX_WHITESPACE = 2
"""Characters in a row between the parts of JSON: one may indent, but not for ever."""
PREPARE_AFTER_S = 10.0
"""What starts then takes a second of a core: the start, and whoever ends before, have better use for it."""


class GrammarCompiler:
    """Compiles constraints for one vocabulary, each once while it is in use or lately was.

    For any number of threads. The first constraint takes seconds, unless it is prepared: xgrammar is
    imported and the vocabulary read.
    """

    def __init__(self, model_path: str | Path, vocab_size: int) -> None:
        self._tokenizer_file = Path(model_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._compiled: OrderedDict[StructuredOutputs, xgrammar.CompiledGrammar] = OrderedDict()
        """The last used one stands last."""
        self._backends: dict[tuple[int, ...], xgrammar.GrammarCompiler] = {}
        """By the special tokens that count as text: the few sets that forms of tool calls name."""
        self._preparing = threading.Lock()
        self._keeping = threading.Lock()
        """Of `_compiled`. Nobody compiles under it: what compiles for ever holds up nobody."""

    def prepare(self) -> None:
        """What all constraints need, once. Errors: ImportError without xgrammar."""
        with self._preparing:
            self._backend(())

    def prepare_soon(self) -> None:
        """The same on a thread of its own, once the start is over. Without xgrammar nothing."""
        if importlib.util.find_spec("xgrammar") is None:
            return
        timer = threading.Timer(PREPARE_AFTER_S, self.prepare)
        timer.daemon = True
        timer.start()

    def matcher(self, constraint: StructuredOutputs, end_token_ids: tuple[int, ...]) -> SequenceMatcher:
        """A sequence at its beginning. Errors: as `compile`."""
        compiled = self.compile(constraint)
        import xgrammar

        matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(end_token_ids))
        return SequenceMatcher(matcher, end_token_ids=end_token_ids, vocab_size=self._vocab_size)

    def compile(self, constraint: StructuredOutputs) -> "xgrammar.CompiledGrammar":
        """Errors: RuntimeError in xgrammar's words; ImportError without xgrammar."""
        with self._keeping:
            found = self._compiled.get(constraint)
        if found is None:
            found = self._compile(constraint)
        with self._keeping:
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
                return self._backend(()).compile_regex(text)
            case "grammar":
                return self._backend(()).compile_grammar(text)
            case "choice":
                tag = {"type": "structural_tag", "format": constraint.as_format()}
                return self._backend(()).compile_structural_tag(json.dumps(tag))
            case "structural_tag":
                named = tuple(i for i, mark in self._special_tokens.items() if mark in text)
                return self._backend(named).compile_structural_tag(
                    json.dumps(_with_bounded_space(json.loads(text)))
                )

    def _compile_schema(self, schema: str) -> "xgrammar.CompiledGrammar":
        return self._backend(()).compile_json_schema(schema, max_whitespace_cnt=MAX_WHITESPACE)

    def _backend(self, named: tuple[int, ...]) -> "xgrammar.GrammarCompiler":
        """Special tokens add nothing to the text and so are never legal, but for those that a structural tag
        names: its marks."""
        if named not in self._backends:
            import_xgrammar()
            import xgrammar

            vocabulary = [b"" if i in self._special_tokens else text for i, text in enumerate(self._texts)]
            for i in named:
                vocabulary[i] = self._texts[i]
            info = xgrammar.TokenizerInfo(
                vocabulary,
                xgrammar.VocabType.RAW,
                vocab_size=self._vocab_size,
                stop_token_ids=[],  # each matcher has its request's
            )
            self._backends[named] = xgrammar.GrammarCompiler(
                info, max_threads=1, cache_limit_bytes=CACHE_BYTES, enable_dynamic_compilation=True
            )
        return self._backends[named]

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._tokenizer_file))

    @cached_property
    def _special_tokens(self) -> dict[int, str]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {i: token.content for i, token in added.items() if token.special and i < self._vocab_size}

    @cached_property
    def _texts(self) -> list[bytes]:
        """Of each token; empty for an id that the tokenizer does not know."""
        kinds = decoder_kinds(self._tokenizer)
        return [bytes_of(self._tokenizer, kinds, i) for i in range(self._vocab_size)]


def _with_bounded_space(tag: Any) -> Any:
    """The same, with MAX_WHITESPACE in the schemas that leave it open; the schemas themselves are data."""
    if isinstance(tag, list):
        return [_with_bounded_space(child) for child in tag]
    if not isinstance(tag, dict):
        return tag
    bound = {"max_whitespace_cnt": MAX_WHITESPACE} if tag.get("type") == "json_schema" else {}
    return bound | {
        name: child if name == "json_schema" else _with_bounded_space(child) for name, child in tag.items()
    }
