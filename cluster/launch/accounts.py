"""What a group's processes tell of themselves, asked while they run."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray
import ray.exceptions

from cluster.launch.members import Member
from cluster.report.load_report import describe_load
from cluster.report.trace import clock_offset_ns, on_one_clock

if TYPE_CHECKING:
    from kernels_integration.spans import Span


def ask_all(members: Sequence[Member], method: str) -> dict[str, int]:
    """The answers of the actors that live, by name."""
    answers: dict[str, int] = {}
    for name, reference in [(member.name, member.ask(method)) for member in members]:
        try:
            answers[name] = ray.get(reference, timeout=5)
        except ray.exceptions.RayError:
            continue  # the actor is dead or its node is gone
    return answers


def take_trace(members: Sequence[Member]) -> "dict[str, list[Span]]":
    """By actor that lives: its spans since the last call, on this process's clock."""
    here = ray.get_runtime_context().get_node_id()
    offsets_ns = {here: 0}
    trace = {}
    for member in members:
        node_id = member.node.node_id
        try:
            if node_id not in offsets_ns:
                offsets_ns[node_id] = clock_offset_ns(member.clock_ns)
            spans = ray.get(member.ask("take_spans"), timeout=30)
        except ray.exceptions.RayError:
            continue  # the actor is dead or its node is gone
        trace[member.name] = on_one_clock(spans, offsets_ns[node_id])
    return trace


def load_state(shards: Sequence[Member]) -> str:
    """What the shards have read, as the end of a message; "" while one does not answer."""
    asked = [shard.ask("load_progress") for shard in shards]
    try:
        told = describe_load(ray.get(asked, timeout=1))
    except ray.exceptions.RayError:
        return ""
    return f": {told}" if told else ""
