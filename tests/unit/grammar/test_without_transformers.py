"""Grammars where transformers and Triton are not installed, as in the images and after `make setup`."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("xgrammar")

WITHOUT = """
import sys

class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("transformers", "triton"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, NotInstalled())
from actors.grammar.compiler import GrammarCompiler
from actors.structured_outputs import StructuredOutputs
from tests.support.groups import TINY_DSA

matcher = GrammarCompiler(TINY_DSA, 6144).matcher(StructuredOutputs.of(json={"type": "integer"}), (1,))
assert matcher.legal([]).any()
assert not {"transformers", "triton"} & sys.modules.keys()
print("served")
"""


@pytest.mark.slow
def test_grammars_need_neither_transformers_nor_triton() -> None:
    root = Path(__file__).parents[3]
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=root, capture_output=True, text=True, timeout=120
    )
    assert found.stdout.strip() == "served", found.stderr
