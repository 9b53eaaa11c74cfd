"""A shard whose steps have fixed shapes: what a device can run without the host, and a graph can replay.

It executes the same messages as `Shard` and comes to the same tokens, drafts and lengths. Between the message
and the report nothing is read back, with two exceptions that the host knows beforehand: a request with rules,
whose tokens the host counts, and log probabilities. State and layout: contracts/device_step.md. Coupled
acceptance only.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from actors.config import GroupConfig
from actors.grammar.compiler import GrammarCompiler
from actors.messages import PENDING_CAPACITY, StepInput, StepOutput
from actors.model.model import Model
from actors.shard.boundary import Boundary, Descent
from actors.shard.chunk_rows import ChunkRows
from actors.shard.decode_graphs import DecodeGraphs
from actors.shard.device_layout import HostView, StepLayout
from actors.shard.device_passes import DevicePasses, Passed
from actors.shard.device_rows import DeviceRowMaker
from actors.shard.device_sampler import finite_or_none
from actors.shard.device_state import DeviceState
from actors.shard.locating import locating
from actors.shard.logprobs_message import logprobs_message
from actors.shard.mtp_modules import MtpModules
from actors.shard.one_arithmetic import require_one_arithmetic
from actors.shard.prompt_fill import PromptFill
from actors.shard.prompt_logprobs import PromptLogprobs
from actors.shard.samplers import draws_by_rejection
from actors.shard.slot_rules import SlotRules
from actors.shard.step_rules import StepRules
from kernels_integration.collectives import Collectives
from kernels_integration.dcp import DcpGroup
from kernels_integration.kv_cache import KVCache
from kernels_integration.logprobs import Logprobs, logprobs_of
from kernels_integration.spans import Span, Spans
from kernels_integration.token_marks import MASKED


@dataclass(frozen=True, slots=True)
class _Unreported:
    """A step that the device has been given, and what its report is made of."""

    step: StepInput
    layout: StepLayout
    known: Descent
    """`Passed.report`"""
    logprobs: tuple[Logprobs | None, Logprobs | None]
    """Of the tokens drawn, and of prompts."""
    report: Callable[[StepOutput], None]


class DeviceShard:
    """The state of one rank, on its device. Errors: as `Shard`, but for tables, which the host cannot see."""

    def __init__(
        self,
        config: GroupConfig,
        model: Model,
        cache: KVCache,
        *,
        tp: Collectives,
        dcp: DcpGroup,
        spans: Spans,
    ) -> None:
        assert not draws_by_rejection(config), "standard rejection sampling has no fixed shapes yet"
        self._drafts = config.num_speculative_tokens > 0
        self._is_deferred = config.scheduling == "deferred"
        self._unreported: deque[_Unreported] = deque()
        self._model = model
        self._tp = tp
        self._spans = spans
        self._boundary = boundary = Boundary(model.backend.device)
        capacity = PENDING_CAPACITY if self._drafts else 1
        self._host = HostView(
            config.max_num_seqs,
            capacity=capacity,
            max_model_len=config.max_model_len,
            index_topk=model.config.index_topk if model.config.has_indexer else None,
        )
        self._state = DeviceState(
            num_slots=config.max_num_seqs,
            max_blocks=-(-config.max_model_len // (config.block_size * dcp.size)),
            capacity=capacity,
            hidden_size=model.config.hidden_size,
            dtype=model.dtype,
            boundary=boundary,
        )
        rows = DeviceRowMaker(self._state, dcp, block_size=config.block_size, boundary=boundary)
        self._modules = MtpModules(model, cache, rows, num_slots=config.max_num_seqs + 1, boundary=boundary)
        self._passes = DevicePasses(model, cache, self._state, rows, self._modules, tp=tp, spans=spans)
        is_capturable = model.backend.is_capturable and boundary.device.type == "cuda" and tp.size == 1
        self._graphs = DecodeGraphs(self._passes) if is_capturable else None
        vocab_start, slice_size = model.vocab_start, -(-model.config.vocab_size // tp.size)
        self.compiler = GrammarCompiler(config.model_path, model.config.vocab_size)
        self._rules = SlotRules(
            vocab_start=vocab_start,
            slice_size=slice_size,
            boundary=boundary,
            compiler=self.compiler,
        )
        self._prompt_logprobs = PromptLogprobs(
            vocab_start=vocab_start, slice_size=slice_size, boundary=boundary
        )

    @torch.inference_mode()
    def execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        """Run one step. On rank 0 `report` is called once its tokens are known: in sync mode before this
        returns; in deferred mode perhaps in `settle`, so that the device has its next step before this ends.
        """
        with locating(step.step, self._tp.rank):
            self._execute(step, report)

    def _execute(self, step: StepInput, report: Callable[[StepOutput], None]) -> None:
        self._apply(step)
        layout = self._host.layout(step)
        rules = StepRules(self._rules, layout, self._boundary) if layout.has_rules else None
        chunks = ChunkRows.of(step, layout.chunks, self._boundary)
        places = self._boundary.up(layout.places)
        if self._graphs is not None and chunks is None and rules is None:
            with self._spans("graph"):
                passed = self._graphs.run(layout.shape, places)
        else:
            passed = self._passes.run(layout.shape, places, chunks, rules)
        logprobs = self._logprobs_of(layout, passed)
        chunk_hidden = passed.hidden[layout.shape.num_verify_rows :]
        prompt_logprobs = self._prompt_logprobs.of_step(
            layout.chunks, chunk_hidden, self._model.logits, self._tp
        )
        if self._tp.rank == 0:
            known = self._boundary.start_down(passed.report)
            self._unreported.append(_Unreported(step, layout, known, (logprobs, prompt_logprobs), report))
        is_awaited = rules is not None or logprobs is not None or prompt_logprobs is not None
        self.settle(wait=is_awaited or not self._is_deferred)
        if rules is not None:
            rules.count(passed.drawn, passed.num_emitted)
        if chunks is not None:
            self._take_chunks(step, layout, chunk_hidden, passed.drawn[layout.shape.num_verify_rows :])

    def rejoin(self) -> None:
        """As Shard.rejoin. Steps of the set before are reported late: their epoch tells."""
        self.settle(wait=True)
        require_one_arithmetic(self._model.backend, self._tp)

    def settle(self, *, wait: bool) -> bool:
        """Report the steps that the device has done, in order; wait: all. Whether none is left to report."""
        while self._unreported and (wait or self._unreported[0].known.is_done):
            done = self._unreported.popleft()
            with locating(done.step.step, self._tp.rank):
                done.report(self._output(done))
        return not self._unreported

    def take_spans(self) -> list[Span]:
        """Where the time went since the last call; empty unless the group is traced."""
        return self._spans.take()

    def _apply(self, step: StepInput) -> None:
        """Admissions and new blocks: small scatters."""
        self._state.admit(step.admit)
        for admission in step.admit:
            self._host.admit(admission)
            self._rules.admit(admission)
            self._prompt_logprobs.admit(admission)
        self._state.add_blocks(*self._host.add_blocks(step))

    def _logprobs_of(self, layout: StepLayout, passed: Passed) -> Logprobs | None:
        if layout.num_logprobs < 0:
            return None
        asked = self._boundary.up(layout.logprob_rows)
        return logprobs_of(
            finite_or_none(passed.logits.index_select(0, asked)),
            self._model.vocab_start,
            passed.unmasked.index_select(0, asked),
            layout.num_logprobs,
            self._tp,
        )

    def _output(self, of: "_Unreported") -> StepOutput:
        """The report: here the host waits for the device, if it must."""
        step, layout, shape = of.step, of.layout, of.layout.shape
        chunks, k = layout.chunks, layout.k[: layout.num_verifies]
        finals = shape.num_verify_rows + np.arange(int(chunks.final.sum()))
        own = np.concatenate([layout.taken(shape.k_max + 1, k + 1), finals])
        with self._spans("wait"):
            copied = of.known.array().astype(np.int32)
        bounds = [shape.num_places * shape.k_max, len(copied) - shape.num_places]
        drafts, drawn, lengths = np.split(copied, bounds)
        ends = (chunks.starts + chunks.counts).astype(np.int32)
        logprobs, prompt_logprobs = of.logprobs
        return StepOutput(
            epoch=step.epoch,
            step=step.step,
            drafts=drafts[layout.taken(shape.k_max, k)],
            tokens=drawn[own],
            length=np.concatenate([lengths[: layout.num_verifies], ends]),
            logprobs=logprobs_message(logprobs, self._boundary),
            prompt_logprobs=logprobs_message(prompt_logprobs, self._boundary),
        )

    def _take_chunks(self, step: StepInput, layout: StepLayout, hidden: Tensor, drawn: Tensor) -> None:
        """Prompt fill, and what chunks leave: a length, a final one's pending row, a middle one's state.

        hidden [T, hidden]: of the chunk rows; drawn: of the final chunks.
        """
        up, chunks = self._boundary.up, layout.chunks
        ends, following = np.cumsum(chunks.counts) - 1, chunks.starts + chunks.counts
        self._state.length.index_copy_(0, up(chunks.slots), up(following))
        if self._drafts:
            with self._spans("prompt_fill"):
                self._fill_prompt(step, layout, hidden)
        if chunks.final.any():
            states = hidden.index_select(0, up(ends[chunks.final])).unsqueeze(1) if self._drafts else None
            self._state.emit(
                up(chunks.slots[chunks.final]),
                up(following[chunks.final]),
                (drawn != MASKED).long(),
                drawn.unsqueeze(1),
                states,
            )
        if self._drafts and chunks.middle.any():
            states = hidden.index_select(0, up(ends[chunks.middle]))
            self._state.carried.index_copy_(0, up(chunks.slots[chunks.middle]), states)
            self._host.carry(chunks)

    def _fill_prompt(self, step: StepInput, layout: StepLayout, hidden: Tensor) -> None:
        """Run the MTP modules over the chunks' own rows."""
        up = self._boundary.up
        fill = PromptFill.of(layout.chunks, self._host.is_carried(layout.chunks))
        if not fill.num_rows:
            return
        if len(fill.continued):
            hidden = torch.cat([hidden, self._state.carried.index_select(0, up(fill.continued))])
        self._modules.fill(
            fill.slots,
            fill.starts,
            fill.counts,
            up(step.ids.astype(np.int64)[fill.ids]),
            hidden.index_select(0, up(fill.previous)),
            readonly=fill.readonly,
        )
