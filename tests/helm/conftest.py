import pytest

from tests.support.chart import Renderer


@pytest.fixture(scope="session")
def chart() -> Renderer:
    return Renderer()
