"""Whether the tests would notice: faults, planted one at a time, each of which some test must catch.

    python -m tests.planted_faults [--only WORD]

Works on a copy of the repository. A fault that no test catches is a hole in the tests; its name is printed
and the exit status is 1. Takes half an hour of one core; run it after a change of how tests are chosen.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
COPIED = ("actors", "cluster", "kernels_integration", "recipes", "tests", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class Fault:
    """`old`, which stands in the file once, becomes `new`; `tests` are where somebody must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


COORDINATOR, KERNELS, SHARD, MODEL = (
    f"tests/unit/{name}" for name in ("coordinator", "kernels", "shard", "model")
)

FAULTS = (
    # Acceptance and sampling
    Fault(
        "accept by the wrong row",
        "actors/acceptance.py",
        "drafts == tokens[:, :-1]",
        "drafts == tokens[:, 1:]",
        COORDINATOR,
    ),
    Fault(
        "emit masked rows",
        "actors/acceptance.py",
        "goes_on = tokens != MASKED",
        "goes_on = tokens >= MASKED",
        COORDINATOR,
    ),
    Fault(
        "reject what is accepted",
        "actors/acceptance.py",
        "accepted < rejection.ratio",
        "accepted > rejection.ratio",
        KERNELS,
    ),
    Fault(
        "top-p may keep nothing", "kernels_integration/filters.py", "clamp_(min=1)", "clamp_(min=0)", KERNELS
    ),
    Fault(
        "min-p cuts its own floor",
        "kernels_integration/filters.py",
        "passes = (distance >= floor)",
        "passes = (distance > floor)",
        KERNELS,
    ),
    Fault(
        "noise of the next position",
        "kernels_integration/noise.py",
        "position_low, position_high = split64(position)",
        "position_low, position_high = split64(position + 1)",
        KERNELS,
    ),
    Fault(
        "a slice's noise from a whole block",
        "kernels_integration/noise.py",
        "skipped = vocab_start - 4 * first_block",
        "skipped = 0",
        KERNELS,
    ),
    Fault(
        "the race eliminates winners",
        "kernels_integration/gumbel_max.py",
        "row, column = (ratio <= latest",
        "row, column = (ratio <= 0.5 * latest",
        KERNELS,
    ),
    # Coordinator
    Fault(
        "verify beyond the limit",
        "actors/coordinator/scheduler.py",
        "bound = min(self._max_drafts, last - lowest, max_rows - 1)",
        "bound = min(self._max_drafts, max_rows - 1)",
        COORDINATOR,
    ),
    Fault(
        "the anchor's row one late",
        "actors/coordinator/scheduler.py",
        "if ahead.min_tokens else num_tokens - 1",
        "if ahead.min_tokens else num_tokens",
        COORDINATOR,
    ),
    Fault(
        "forget the state before a chunk of a prefix hit",
        "actors/shard/prompt_fill.py",
        "firsts = np.where(is_carried, starts, starts + 1)",
        "firsts = np.where(is_carried & (rows.readonly[chunks] == 0), starts, starts + 1)",
        SHARD,
    ),
    Fault(
        "write into read-only rows",
        "actors/coordinator/scheduler.py",
        "readonly = min(max(request.num_hit_tokens - start, 0), num_rows)",
        "readonly = 0",
        COORDINATOR,
    ),
    Fault(
        "admit without room",
        "actors/coordinator/scheduler.py",
        "return has_slot and missing + spare <=",
        "return has_slot or missing + spare <=",
        COORDINATOR,
    ),
    Fault(
        "free a block that others hold",
        "actors/coordinator/blocks.py",
        "-= 1\n            if self._num_holders[block] == 0:",
        "-= 1\n            if self._num_holders[block] <= 1:",
        COORDINATOR,
    ),
    Fault(
        "a reused block stays published",
        "actors/coordinator/blocks.py",
        "del self._block_of[self._hash_of.pop(block)]",
        "self._hash_of.pop(block)",
        COORDINATOR,
    ),
    Fault(
        "tenants share a cache",
        "actors/coordinator/prefix_cache.py",
        "self._digest(salt.encode())",
        'b""',
        COORDINATOR,
    ),
    Fault(
        "a block's hash forgets its past",
        "actors/coordinator/prefix_cache.py",
        "self._digest(parent + tokens.tobytes())",
        "self._digest(tokens.tobytes())",
        COORDINATOR,
    ),
    Fault(
        "stop before min_tokens",
        "actors/coordinator/stopping.py",
        "may_stop = num_tokens > self._num_undecided",
        "may_stop = num_tokens >= self._num_undecided",
        COORDINATOR,
    ),
    Fault(
        "stop strings end at token borders",
        "actors/stop_string.py",
        "text, matched = self._text, self.num_matched",
        "text, matched = self._text, 0",
        COORDINATOR,
    ),
    # DCP, plan, attention, selection
    Fault(
        "a rank counts another's tokens",
        "kernels_integration/dcp.py",
        "over = n - base * W - r * S",
        "over = n - base * W - (r + 1) * S",
        KERNELS,
    ),
    Fault(
        "merge a NaN",
        "kernels_integration/dcp.py",
        "lse.nan_to_num(nan=none, posinf=none, neginf=none).softmax(0)",
        "lse.softmax(0)",
        KERNELS,
    ),
    Fault(
        "items overlap",
        "kernels_integration/plan.py",
        "kv_start = row_first + (starts - row_cost[row]) * BLOCK_TOKENS",
        "kv_start = row_first + (starts - row_cost[row]) * (BLOCK_TOKENS - 1)",
        KERNELS,
    ),
    Fault(
        "padding is attended to",
        "kernels_integration/reference/attention.py",
        'scores.masked_fill_(padding.unsqueeze(1), float("-inf"))',
        "pass",
        KERNELS,
    ),
    Fault(
        "ties to the later key",
        "kernels_integration/reference/selection.py",
        "tied.cumsum(dim=-1, dtype=torch.int32) <= free",
        "tied.flip(-1).cumsum(dim=-1, dtype=torch.int32).flip(-1) <= free",
        KERNELS,
    ),
    Fault(
        "select what is not visible",
        "kernels_integration/reference/selection.py",
        "masked_fill_(~tile.visible | tile_scores.isnan(), -torch.inf)",
        "masked_fill_(tile_scores.isnan(), -torch.inf)",
        KERNELS,
    ),
    # Model
    Fault(
        "experts not scaled",
        "kernels_integration/reference/experts.py",
        "weights.mul_(routing.scaling_factor)",
        "weights",
        MODEL,
    ),
    Fault(
        "groups by their best expert",
        "kernels_integration/reference/experts.py",
        "grouped.topk(2, dim=-1)",
        "grouped.topk(1, dim=-1)",
        MODEL,
    ),
    Fault(
        "neighbours' experts too",
        "kernels_integration/reference/experts.py",
        "if 0 <= local < len(self._experts):",
        "if local < len(self._experts):",
        MODEL,
    ),
    Fault(
        "MTP without its token",
        "actors/model/mtp.py",
        "norm(embedding, self.embedding_norm, self.eps)",
        "norm(prev_hidden, self.embedding_norm, self.eps)",
        MODEL,
    ),
    # Shard
    Fault(
        "rows that fell out are seen",
        "actors/shard/pending.py",
        "self._fell_out[slot] = True",
        "self._fell_out[slot] = False",
        SHARD,
    ),
    Fault(
        "a former owner's rows remain",
        "actors/shard/pending.py",
        "        self._count[slot] = 0\n        self._fell_out",
        "        self._fell_out",
        SHARD,
    ),
)


def plant(fault: Fault, folder: Path) -> None:
    path = folder / fault.file
    text = path.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} holds its text {text.count(fault.old)} times, not once")
    path.write_text(text.replace(fault.old, fault.new))


def first_failure(fault: Fault | None, tests: str) -> str | None:
    """The first test that fails with the fault; None: all pass. A test that cannot be collected ends all."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        for name in COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(source, folder / name)
        if fault is not None:
            plant(fault, folder)
        options = ["-q", "-x", "-p", "no:cacheprovider", "--sample-seed", "planted", "-m", "not alone"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, tests],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 0 or (done.returncode == 1 and failed):
        return failed[1] if failed else None
    raise SystemExit(f"pytest ended with {done.returncode}\n{done.stdout[-2000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name holds this word")
    args = parser.parse_args()
    chosen = [fault for fault in FAULTS if args.only in fault.name]
    for tests in sorted({fault.tests for fault in chosen}):
        if (failed := first_failure(None, tests)) is not None:
            raise SystemExit(f"{failed} fails without a fault: nothing could be told")
    missed = []
    for fault in chosen:
        caught_by = first_failure(fault, fault.tests)
        print(f"{fault.name}: {caught_by or 'MISSED'}", flush=True)
        if caught_by is None:
            missed.append(fault.name)
    print(f"{len(chosen)} faults, missed: {', '.join(missed) or 'none'}")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
