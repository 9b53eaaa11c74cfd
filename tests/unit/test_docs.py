"""What the documents name exists: linked files, and every path of the repository in code quotes."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (
    *("cluster", "actors", "kernels_integration", "tests"),
    *("benchmarks", "recipes", "docs", "helm", "docker", ".ci"),
)
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "recipes").rglob("*.md")]


def _of_the_repository(text: str) -> list[str]:
    """Paths in code quotes that begin with one of our folders; NAME stands for any name."""
    quoted = re.findall(r"`([\w.-]+/[\w./*{},-]*)`", text)
    return [path.replace("NAME", "*") for path in quoted if path.split("/")[0] in FOLDERS]


def _alternatives(path: str) -> list[str]:
    match = re.search(r"\{([^}]*)\}", path)
    if match is None:
        return [path]
    return [path.replace(match[0], word, 1) for word in match[1].split(",")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_in_code_quotes_exist(page: Path) -> None:
    paths = [p for found in _of_the_repository(page.read_text()) for p in _alternatives(found)]
    assert [path for path in paths if not any(ROOT.glob(path.rstrip("/")))] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_linked_files_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
    files = [link for link in links if "://" not in link]
    assert [link for link in files if not (page.parent / link).exists()] == []


def test_the_checks_can_fail() -> None:
    assert _of_the_repository("`actors/nowhere.py` and `csrc/mla.h`") == ["actors/nowhere.py"]
    assert _alternatives("cluster/{a,b}.py") == ["cluster/a.py", "cluster/b.py"]
