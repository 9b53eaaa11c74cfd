"""What doctor finds on a node, looked at on this one."""

import sys
from pathlib import Path

from cluster.report.node_check import look


def test_a_node_with_everything(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    facts = look(("ray", "numpy"), str(tmp_path))
    assert (facts.missing, facts.has_model, facts.executable) == ((), True, sys.executable)
    assert facts.memory_bytes > 2**20
    assert look((), None).has_model, "it travels with the code"


def test_what_a_node_lacks(tmp_path: Path) -> None:
    facts = look(("numpy", "no-such-distribution-here"), str(tmp_path / "nowhere"))
    assert facts.missing == ("no-such-distribution-here",)
    assert not facts.has_model
