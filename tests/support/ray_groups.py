"""What the Ray tests share: a small config of the bundled checkpoint, requests, a look at processes."""

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from actors.config import GroupConfig
from actors.inline_group import InlineGroup
from actors.requests import Request, RequestFailed
from actors.sampling_params import SamplingParams
from cluster.answering.group_client import GroupClient
from tests.support.streams import tokens_of

CHECKPOINT = Path(__file__).parents[2] / "cluster" / "assets" / "tiny-dsa"
PROMPTS = ("What is the capital of France?", "Tell me a story about a dog.", "What is 2 + 3?")


def group_config(tp: int, dcp: int, *, model_path: str = str(CHECKPOINT)) -> GroupConfig:
    # float64: summation order differs between topologies and must not decide (see the proofs).
    return GroupConfig(
        model_path=model_path,
        served_model_name="tiny-dsa",
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        num_speculative_tokens=3,
        max_model_len=512,
        max_num_seqs=8,
        max_num_batched_tokens=128,
        block_size=16,
        num_kv_blocks=160,
        dtype="float64",
        kv_cache_dtype="float64",
    )


def requests(max_tokens: int = 24, *, ignore_eos: bool = False) -> list[Request]:
    """One greedy and one seeded request of each prompt."""
    tokenizer = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))
    return [
        Request(
            request_id=f"{number}-{temperature:g}",
            prompt_token_ids=tuple(tokenizer.encode(prompt).ids),
            params=SamplingParams(temperature=temperature, max_tokens=max_tokens, ignore_eos=ignore_eos),
            seed=1000 + number,
            eos_token_ids=(0,),
        )
        for number, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 0.8)
    ]


def inline_tokens(requests: list[Request]) -> dict[str, list[int]]:
    """The tokens of one rank in this process: what every topology must repeat."""
    group = InlineGroup(group_config(1, 1))
    tokens: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        group.submit(request)
    while group.has_work:
        for update in group.step():
            assert not isinstance(update, RequestFailed), update
            tokens[update.request_id] += update.token_ids
    group.close()
    return tokens


async def served_tokens(client: GroupClient, requests: list[Request]) -> dict[str, list[int]]:
    results = await asyncio.gather(*(tokens_of(client, request) for request in requests))
    return {request.request_id: tokens for request, tokens in zip(requests, results, strict=True)}


async def eventually(condition: Callable[[], bool], timeout_s: float) -> float:
    """Wait for the condition; how long it took."""
    start_s = time.monotonic()
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
    return time.monotonic() - start_s


def processes_with(text: str) -> dict[int, str]:
    """Command lines that contain the text, by process id; this process is left out."""
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue  # it has ended meanwhile
            if text in command:
                found[int(entry.name)] = command
    return found


def is_alive(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False
