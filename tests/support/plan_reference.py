"""The serial planner in plain Python, item by item, as the plan contract words it."""

from dataclasses import dataclass, field
from math import ceil


@dataclass
class ReferencePlan:
    work_indptr: list[int] = field(default_factory=lambda: [0])
    work_info: list[list[int]] = field(default_factory=list)
    reduce_indptr: list[int] = field(default_factory=lambda: [0])
    reduce_final_map: list[list[int]] = field(default_factory=list)
    reduce_partial_map: list[int] = field(default_factory=list)


def plan_serially(kv_lens: list[int], num_parts: int) -> ReferencePlan:
    overhead = 16
    blocks = [ceil(length / 16) for length in kv_lens]
    payload = ceil(sum(b + overhead for b in blocks) / num_parts) + overhead
    starts = [sum(kv_lens[:row]) for row in range(len(kv_lens) + 1)]
    plan = ReferencePlan()
    row, done = 0, 0
    parts: list[list[int]] = [[] for _ in kv_lens]
    for _worker in range(num_parts):
        remain = payload
        while row < len(kv_lens):
            kv_start = starts[row] + done * 16
            if blocks[row] - done + overhead <= remain:
                parts[row].append(len(plan.work_info))
                plan.work_info.append([row, -1, row, row + 1, kv_start, starts[row + 1], 0, 0])
                remain -= blocks[row] - done + overhead
                row, done = row + 1, 0
                continue
            if remain > overhead:
                taken = remain - overhead
                kv_end = kv_start + taken * 16
                parts[row].append(len(plan.work_info))
                plan.work_info.append([row, -1, row, row + 1, kv_start, kv_end, starts[row + 1] - kv_end, 0])
                done += taken
            break
        plan.work_indptr.append(len(plan.work_info))
    assert row == len(kv_lens)
    for row, items in enumerate(parts):
        split = len(items) > 1
        plan.reduce_final_map.append([row, row + 1] if split else [-1, -1])
        for item in items if split else ():
            plan.work_info[item][1] = len(plan.reduce_partial_map)
            plan.reduce_partial_map.append(len(plan.reduce_partial_map))
        plan.reduce_indptr.append(len(plan.reduce_partial_map))
    return plan
