"""The planted faults fit their code. Running them takes minutes: python -m tests.planted_faults."""

from pathlib import Path

import pytest

from tests.planted_faults import FAULTS, ROOT, Fault, plant


def test_there_are_thirty() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_fits_its_file_once(fault: Fault, tmp_path: Path) -> None:
    copy = tmp_path / fault.file
    copy.parent.mkdir(parents=True)
    original = (ROOT / fault.file).read_text()
    copy.write_text(original)
    plant(fault, tmp_path)
    assert copy.read_text() != original
    compile(copy.read_text(), fault.file, "exec")
