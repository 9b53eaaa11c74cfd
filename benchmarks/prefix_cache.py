"""The prefix cache on prompts that share a beginning: time to the first token, and tokens per second.

    python -m benchmarks.prefix_cache [--requests 16] [--shared 512] [--own 16] [--new-tokens 16]

Requests arrive one after another while `--concurrency` of them run. With and without cache take turns.
"""

import argparse
import statistics
import time

from actors.inline_group import InlineGroup
from actors.requests import Request, RequestUpdate
from benchmarks import harness


def requests_for(args: argparse.Namespace, tag: str) -> list[Request]:
    """All begin with the same tokens, others in each repeat."""
    shared = tuple(hash((tag, j)) % 4000 + 2 for j in range(args.shared))
    return [
        harness.request(
            f"{tag}-{i}",
            shared + tuple(hash((tag, i, j)) % 4000 + 2 for j in range(args.own)),
            num_tokens=args.new_tokens,
        )
        for i in range(args.requests)
    ]


def measure(group: InlineGroup, requests: list[Request], concurrency: int) -> tuple[float, float, int]:
    """Median seconds to the first token, tokens per second, cached tokens."""
    waiting = list(requests)
    submitted: dict[str, float] = {}
    first: dict[str, float] = {}
    num_live = num_tokens = num_cached = 0
    begin = time.perf_counter()
    while waiting or group.has_work:
        while waiting and num_live < concurrency:
            request = waiting.pop(0)
            submitted[request.request_id] = time.perf_counter()
            group.submit(request)
            num_live += 1
        for update in group.step():
            assert isinstance(update, RequestUpdate)
            first.setdefault(update.request_id, time.perf_counter() - submitted[update.request_id])
            num_tokens += len(update.token_ids)
            if update.finish_reason is not None:
                num_live -= 1
                num_cached += update.num_cached_tokens
    return statistics.median(first.values()), num_tokens / (time.perf_counter() - begin), num_cached


def main() -> None:
    parser = harness.parser(__doc__)
    for name, default in [
        ("requests", 16),
        ("concurrency", 4),
        ("shared", 512),
        ("own", 16),
        ("new-tokens", 16),
        ("repeats", 3),
    ]:
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    print(harness.machine())
    groups = {}
    for is_on in (False, True):
        groups[is_on] = harness.inline_group(
            enable_prefix_caching=is_on, max_model_len=1024, kv_cache_memory_bytes="128M"
        )
    results: dict[bool, list[tuple[float, float, int]]] = {False: [], True: []}
    for repeat in range(args.repeats + 1):
        for is_on, group in groups.items():
            results[is_on].append(measure(group, requests_for(args, f"{is_on}{repeat}"), args.concurrency))
    for is_on, group in groups.items():
        group.close()
        counted = results[is_on][1:]
        print(
            f"cache {'on ' if is_on else 'off'}: first token after "
            f"{min(r[0] for r in counted) * 1e3:7.1f} ms, {max(r[1] for r in counted):7.1f} tokens/s, "
            f"{counted[0][2]} of {args.requests * (args.shared + args.own)} prompt tokens cached"
        )


if __name__ == "__main__":
    main()
