"""What operators learn of one request: its metrics, and its line in the access log. Never its texts."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from actors.requests import Request, RequestUpdate
from cluster.gateway.metrics import ABORTS, CLIENT_GONE, GatewayMetrics
from kernels_integration.errors import MAX_SHOWN, InvalidRequestError, LatentrayError

logger = logging.getLogger("latentray.access")


class RequestRecord:
    """Of one call, from its arrival on."""

    def __init__(self, request_id: str, metrics: GatewayMetrics) -> None:
        self._request_id = request_id
        self._metrics = metrics
        self._arrived_at_s = time.monotonic()
        self._num_choices = 0
        """0 until it is accepted."""
        self._num_prompt_tokens = 0
        self._num_cached_tokens = 0
        self._queue_s = 0.0
        # By choice.
        self._first_at_s: dict[int, float] = {}
        self._newest_at_s: dict[int, float] = {}
        self._num_completion_tokens: dict[int, int] = {}
        self._finish_reasons: dict[int, str] = {}

    def accepted(self, *requests: Request) -> None:
        """What the call asks for was found to be legal. Its choices are counted through."""
        self._num_choices = sum(request.params.n for request in requests)
        self._num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)

    def took(self, choice: int, update: RequestUpdate) -> None:
        """The group sent this."""
        metrics, now_s = self._metrics, time.monotonic()
        if update.token_ids:
            if choice not in self._first_at_s:
                self._first_at_s[choice] = now_s
                metrics.time_to_first_token.observe(now_s - self._arrived_at_s)
            else:
                for histogram in metrics.between_tokens:
                    histogram.observe(now_s - self._newest_at_s[choice])
            self._newest_at_s[choice] = now_s
        self._num_cached_tokens = max(self._num_cached_tokens, update.num_cached_tokens)
        self._num_completion_tokens[choice] = num_tokens = update.num_completion_tokens
        if update.finish_reason is None:
            return
        self._finish_reasons[choice] = update.finish_reason
        metrics.latency.observe(now_s - self._arrived_at_s)
        metrics.count_finished(update.finish_reason)
        metrics.prompt_tokens.observe(update.num_prompt_tokens)
        metrics.generation_tokens.observe(num_tokens)
        if (phases := update.phases) is not None:
            self._queue_s = max(self._queue_s, phases.queue_s)
            metrics.queue_time.observe(phases.queue_s)
            metrics.prefill_time.observe(phases.prefill_s)
            metrics.decode_time.observe(phases.decode_s)
        if num_tokens > 1:
            metrics.time_per_token.observe((now_s - self._first_at_s[choice]) / (num_tokens - 1))

    def ended(self, code: str | None = None, field: str = "") -> None:
        """Once, at the end of the call. code: of the error that ended it early; None: it was answered."""
        if code is None:
            self._metrics.max_generation_tokens.observe(max(self._num_completion_tokens.values(), default=0))
            finish = ",".join(self._finish_reasons[choice] for choice in sorted(self._finish_reasons))
        else:
            finish = "abort" if code in ABORTS else "error"
            self._metrics.count_failed(code)
            if finish == "error":
                self._metrics.recent_failures.add(self._request_id, code, field)
            self._metrics.count_finished(finish, self._num_choices - len(self._finish_reasons))
        if not logger.isEnabledFor(logging.INFO):
            return
        facts: dict[str, str | int | float] = {
            "id": self._request_id[:MAX_SHOWN],
            "finish": finish,
            "prompt_tokens": self._num_prompt_tokens,
            "cached_tokens": self._num_cached_tokens,
            "completion_tokens": sum(self._num_completion_tokens.values()),
        }
        if self._queue_s:
            facts["queue_s"] = round(self._queue_s, 3)
        if self._first_at_s:
            facts["first_token_s"] = round(min(self._first_at_s.values()) - self._arrived_at_s, 3)
        facts["total_s"] = round(time.monotonic() - self._arrived_at_s, 3)
        if code is not None:
            facts["code"] = code
        if field:
            facts["field"] = field[:MAX_SHOWN]
        words = " ".join(f"{name}={_in_words(name, value)}" for name, value in facts.items())
        logger.info("%s", words, extra={"facts": facts})


def _in_words(name: str, value: str | int | float) -> str:
    """What comes from a client is quoted, so that a line stays a line."""
    if name in ("id", "field"):
        return json.dumps(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _code_of(error: BaseException) -> str:
    """Of what is no error of ours: a refusal by the HTTP server has a status."""
    is_refusal = 400 <= getattr(error, "status", 500) < 500
    return InvalidRequestError.code if is_refusal else LatentrayError.code


@contextmanager
def recorded(
    request_id: str, metrics: GatewayMetrics, time_remaining: Callable[[], float | None]
) -> Iterator[RequestRecord]:
    """The record of the call that runs inside; how that ends is how the request ended.

    time_remaining: of the call, in seconds; a call whose deadline passes is cancelled like one of a client
    that went away.
    """
    record = RequestRecord(request_id, metrics)
    try:
        yield record
    except asyncio.CancelledError:
        remaining_s = time_remaining()
        is_late = remaining_s is not None and remaining_s <= 0
        record.ended("deadline_exceeded" if is_late else CLIENT_GONE)
        raise
    except InvalidRequestError as error:
        record.ended(error.code, error.field)
        raise
    except LatentrayError as error:
        record.ended(error.code)
        raise
    except BaseException as error:
        record.ended(_code_of(error))
        raise
    record.ended()
