"""xgrammar, also where transformers is not installed.

It takes three classes of transformers, for tokenizers and processors that nobody here hands it. Where
there is no transformers (129 MB), empty classes stand for them while it is imported.
"""

import sys
import threading
from types import ModuleType

_NAMES = ("LogitsProcessor", "PreTrainedTokenizerBase", "PreTrainedTokenizerFast")
_importing = threading.Lock()


def import_xgrammar() -> None:
    """Afterwards `import xgrammar` is quick and needs nothing; the first time this takes a second.

    Errors: ImportError without xgrammar.
    """
    with _importing:
        if "xgrammar" in sys.modules:
            return
        try:
            import transformers
        except ImportError:
            transformers = ModuleType("transformers")
            for name in _NAMES:
                setattr(transformers, name, type(name, (), {}))
            sys.modules["transformers"] = transformers
            try:
                import xgrammar
            finally:
                del sys.modules["transformers"]
        else:
            import xgrammar  # noqa: F401
