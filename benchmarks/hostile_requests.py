"""What the costliest requests of one client do to the stream of another, and to the server's memory.

    python -m benchmarks.hostile_requests [--only NAME ...] [--seconds 5]

Beside a client that asks for one answer after the other, a second one sends in turn: nothing, a text and
token ids as long as a message may be, eight such texts at once, 16 million stop token ids, 128 completions
of each of 16 requests, and the longest stop strings. For each: how the server answered, the longest gap
between two pieces of an answer, the longest wait for the first piece of one, and by how much the gateway,
the coordinator and the shards grew. Aims: 0.5 s of gap, and twice the bytes sent. The wait is no gap: a new
request stands in the queue behind those that were accepted before it.
"""

import argparse
import itertools
import multiprocessing
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from benchmarks import harness
from cluster.client import Client
from cluster.config import ServeArgs, load_settings
from cluster.launch.serving import RunningServer, start_server
from kernels_integration.errors import LatentrayError

MESSAGE_BYTES = 16 * 2**20 - 1000
"""A little less than --max-message-size."""
MAX_GAP_S = 0.5
MAX_GROWTH = 2.0
SMALL_BYTES = 2**20
"""What is sent below this is not compared with the growth: a server takes some memory for any request."""
_SAMPLE_S = 0.01


def text(num_bytes: int = MESSAGE_BYTES) -> pb.GenerateRequest:
    return pb.GenerateRequest(text="word " * (num_bytes // 5), stream=True)


def token_ids() -> pb.GenerateRequest:
    request = pb.GenerateRequest(stream=True)
    request.tokenized.input_ids.extend([5] * MESSAGE_BYTES)
    return request


def stop_token_ids() -> pb.GenerateRequest:
    request = pb.GenerateRequest(text="Hello", stream=True)
    request.sampling_params.stop_token_ids.extend([5] * MESSAGE_BYTES)
    return request


def many_choices() -> pb.GenerateRequest:
    params = pb.SamplingParams(n=128, max_tokens=500, ignore_eos=True, temperature=1.0)
    return pb.GenerateRequest(text="Hello", stream=True, sampling_params=params)


def long_stops() -> pb.GenerateRequest:
    stop = [chr(97 + i) * 1024 for i in range(16)]
    params = pb.SamplingParams(stop=stop, max_tokens=500, ignore_eos=True)
    return pb.GenerateRequest(text="Hello", stream=True, sampling_params=params)


ATTACKS: dict[str, tuple[Callable[[], pb.GenerateRequest], int]] = {
    "nothing": (text, 0),
    "a text of 16 MB": (text, 1),
    "eight texts of 16 MB": (text, 8),
    "16 million token ids": (token_ids, 1),
    "16 million stop ids": (stop_token_ids, 1),
    "16 x 128 choices": (many_choices, 16),
    "16 x the longest stops": (long_stops, 16),
}
"""By name: what makes the request, and how many are sent at once."""


def stream(address: str, started: Event, stopped: Event, told: Connection) -> None:
    """The normal client, a process: tells of each answer when it was asked for and when each piece came."""
    times_s: list[list[float]] = []
    errors = 0
    with Client(address, decode=False) as client:
        while not stopped.is_set():
            times_s.append([time.monotonic()])
            try:
                for _ in client.generate("The king", max_tokens=500, ignore_eos=True):
                    times_s[-1].append(time.monotonic())
                    started.set()
                    if stopped.is_set():
                        break
            except LatentrayError:
                errors += 1
                time.sleep(0.1)
    told.send((times_s, errors))


def attack(address: str, name: str, seconds: float, told: Connection) -> None:
    """The hostile client, a process: bytes sent, and how many calls ended in which way, within `seconds`."""
    make, number = ATTACKS[name]
    message = make().SerializeToString() if number else b""
    unlimited = [("grpc.max_send_message_length", -1)]
    told.send("ready")
    told.recv()

    def call(_: int) -> str:
        with grpc.insecure_channel(address, options=unlimited) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            try:
                for _ in stub.Generate(pb.GenerateRequest.FromString(message), timeout=seconds):
                    pass
            except grpc.RpcError as error:
                return str(error.code().name)
            return "OK"

    if not number:
        time.sleep(seconds)
        told.send((0, {}))
        return
    with ThreadPoolExecutor(number) as pool:
        ends = Counter(pool.map(call, range(number)))
    told.send((number * len(message), dict(ends)))


class Memory:
    """The largest sum of the resident bytes of some processes, and what it was at first."""

    def __init__(self, process_ids: list[int]) -> None:
        self._process_ids = process_ids
        self.first = self.peak = self._resident_bytes()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Memory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._done.wait(_SAMPLE_S):
            self.peak = max(self.peak, self._resident_bytes())

    def _resident_bytes(self) -> int:
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in self._process_ids)
        return sum(pages) * os.sysconf("SC_PAGE_SIZE")


def measure(server: RunningServer, names: list[str], seconds: float) -> Iterator[dict[str, Any]]:
    """One attack after the other beside one stream."""
    context = multiprocessing.get_context("spawn")
    started, stopped = context.Event(), context.Event()
    here, there = context.Pipe()
    normal = context.Process(target=stream, args=(server.address, started, stopped, there))
    normal.start()
    assert started.wait(120), "the normal stream does not run"
    results = []
    for name in names:
        ours, theirs = context.Pipe()
        hostile = context.Process(target=attack, args=(server.address, name, seconds, theirs))
        hostile.start()
        ours.recv()
        start_s = time.monotonic()
        with Memory(list(server.process_ids().values())) as memory:
            ours.send("go")
            num_bytes, ends = ours.recv()
            answered_s = time.monotonic() - start_s
            time.sleep(0.5)  # what a cancelled call leaves behind counts too
        hostile.join()
        results.append((name, num_bytes, ends, start_s, answered_s, memory.peak - memory.first))
    stopped.set()
    times_s, errors = here.recv()
    normal.join()
    for name, num_bytes, ends, start_s, answered_s, growth in results:
        end_s = start_s + answered_s + 0.5
        yield {
            "name": name,
            "ends": ", ".join(f"{number} {end}" for end, number in ends.items()),
            "answered_s": answered_s,
            "gap_s": _longest(times_s, start_s, end_s, first=False),
            "wait_s": _longest(times_s, start_s, end_s, first=True),
            "growth": growth,
            "factor": growth / num_bytes if num_bytes >= SMALL_BYTES else None,
        }
    if errors:
        print(f"the normal stream was refused or ended {errors} times")


def _longest(times_s: list[list[float]], start_s: float, end_s: float, *, first: bool) -> float:
    """Between start_s and end_s. first: wait for an answer's first piece; else gap between its pieces."""
    found = [0.0]
    for moments in times_s:
        pairs = list(itertools.pairwise([*moments, end_s] if len(moments) == 1 else moments))
        for before, after in pairs[:1] if first else pairs[1:]:
            found.append(min(after, end_s) - max(before, start_s))
    return max(found)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(ATTACKS), default=list(ATTACKS), metavar="NAME")
    parser.add_argument("--seconds", type=float, default=5.0, help="the deadline of the hostile requests")
    flags: argparse.Namespace = parser.parse_args()
    print(harness.machine())
    settings = {"port": 0, "http_port": "none", "max_model_len": 1024, "log_level": "error"}
    settings["kv_cache_memory_bytes"] = "64M"
    with start_server(load_settings(ServeArgs, settings, environ={}).args) as server:
        head = f"{'beside the stream':24} {'longest gap':>11} {'wait':>7} {'memory':>9}"
        print(f"{head} {'x sent':>7} {'until':>7}  ends")
        for row in measure(server, flags.only, flags.seconds):
            factor = "" if row["factor"] is None else f"{row['factor']:.1f}"
            is_over = row["gap_s"] > MAX_GAP_S or (row["factor"] or 0) > MAX_GROWTH
            print(
                f"{row['name']:24} {row['gap_s']:9.2f} s {row['wait_s']:5.2f} s "
                f"{row['growth'] / 1e6:6.0f} MB {factor:>7} {row['answered_s']:5.1f} s  {row['ends']}"
                f"{'  OVER THE AIM' if is_over else ''}"
            )


if __name__ == "__main__":
    main()
