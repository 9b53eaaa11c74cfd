"""docs/runbook.md knows every alert of the chart and every code of an error."""

import re
from pathlib import Path

from cluster.errors import OUTCOMES
from cluster.gateway.metrics import CLIENT_GONE

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "runbook.md").read_text()


def _first_cells(heading: str) -> list[str]:
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return [line.split("|")[1].strip() for line in section.splitlines() if line.startswith("|")][2:]


def test_every_alert_has_its_row() -> None:
    rules = (ROOT / "helm" / "latentray" / "templates" / "monitoring.yaml").read_text()
    assert _first_cells("By alert") == re.findall(r"- alert: (\w+)", rules)


def test_every_code_has_its_row() -> None:
    told = [code for cell in _first_cells("By error code") for code in re.findall(r"`(\w+)`", cell)]
    assert sorted(told) == sorted([*OUTCOMES, CLIENT_GONE])


def test_messages_are_those_of_the_code() -> None:
    sources = "".join(
        file.read_text()
        for folder in ("cluster", "kernels_integration")
        for file in (ROOT / folder).rglob("*.py")
    )
    said = re.sub(r'"\s*\n\s*f?"', "", sources)  # joined strings
    for cell in _first_cells("By message, when nothing starts"):
        quoted = cell.split("`")[1].removesuffix(" LATENTRAY_...")
        assert quoted in said, quoted
