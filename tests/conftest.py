"""How a run chooses tests: samples of large products, and what must run one at a time."""

import importlib.util
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before anything imports torch: tests run side by side, and a thread that spins for its share slows all.
os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).parents[1]
ONE_AT_A_TIME = ("tests/ray/", "tests/gateway/", "tests/unit/transport/")
"""They start clusters and servers, or watch clocks."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-cases", action="store_true", help="every case of products, not a sample")
    parser.addoption(
        "--sample-seed",
        default=os.environ.get("SAMPLE_SEED") or _commit(),
        help="chooses the sample of products; by default the commit, so that it changes with each",
    )


def pytest_configure() -> None:
    """How long one example takes says nothing on a busy machine; what hangs, the timeout of a test ends."""
    if importlib.util.find_spec("hypothesis") is None:
        return  # as where only kernels are tested
    from hypothesis import settings

    settings.register_profile("no deadline", deadline=None)
    settings.load_profile("no deadline")


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--all-cases"):
        return "products: all cases"
    return f"products: a sample; the same one again: --sample-seed {config.getoption('--sample-seed')}"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep `num` cases of each test marked product(num); mark what must be alone."""
    if not config.getoption("--all-cases"):
        dropped = _not_in_sample(items, config.getoption("--sample-seed"))
        items[:] = [item for item in items if item not in dropped]
        config.hook.pytest_deselected(items=list(dropped))
    for item in items:
        needs = any(item.get_closest_marker(name) for name in ("ray", "gateway"))
        if needs or item.nodeid.startswith(ONE_AT_A_TIME):
            item.add_marker(pytest.mark.alone)


def _not_in_sample(items: list[pytest.Item], seed: str) -> set[pytest.Item]:
    products: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("product"):
            products[item.nodeid.split("[")[0]].append(item)
    dropped: set[pytest.Item] = set()
    for name, cases in products.items():
        marker = cases[0].get_closest_marker("product")
        assert marker is not None
        (num,) = marker.args
        dropped.update(random.Random(f"{seed} {name}").sample(cases, max(0, len(cases) - num)))
    return dropped


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or "0"


@pytest.fixture(scope="session", autouse=True)
def _logs_in_a_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Servers and engines that tests start log under the user's state folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield
