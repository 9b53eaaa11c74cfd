"""Answers as a step of a Ray Data pipeline: a class for `Dataset.map_batches`, an engine in each actor."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cluster.answering.engine import start_engine
from cluster.batch.rows import InputRow, digest
from cluster.batch.runner import run_batch
from cluster.config import EngineArgs, load_settings
from cluster.config.resolve import resolve
from cluster.frontend.front_end import ModelFrontend
from kernels_integration.errors import ConfigError, shown

if TYPE_CHECKING:
    import numpy as np

_URLS = {"messages": "/v1/chat/completions", "prompt": "/v1/completions"}
OUTPUT_COLUMNS = ("text", "finish_reason", "prompt_tokens", "completion_tokens", "error")


class Answers:
    """Adds to each row what the model says to it.

    A batch has a column `prompt` (text or token ids) or `messages` (a chat); what else it has stays. It
    gets `text`, `finish_reason`, `prompt_tokens`, `completion_tokens`, and `error`: None, or why there is no
    answer. One row's trouble is no other's. A column `custom_id` names the rows; of them, or else of their
    content, rows without a seed have theirs, so that answers do not depend on how the data is cut.

    body: members of OpenAI's request body for all rows, such as {"temperature": 0, "max_tokens": 64}. A
    column `body` (an object, or its JSON) adds to it, row by row. max_in_flight: requests handed to the
    engine at the same time. settings: those of `cluster.config.EngineArgs`; the group is inside the actor.
    Errors, of the actor's start: ConfigError, CheckpointError.
    """

    def __init__(
        self, *, body: Mapping[str, Any] | None = None, max_in_flight: int | None = None, **settings: Any
    ) -> None:
        config = resolve(load_settings(EngineArgs, settings).args)
        self._body = dict(body or {})
        self._seed = config.seed
        self._max_in_flight = max_in_flight or 2 * config.max_num_seqs
        self._frontend = ModelFrontend.of_group(config)
        self._engine = start_engine(config, executor="inline", tokenizer=self._frontend.tokenizer.backend)

    def __call__(self, batch: "dict[str, np.ndarray]") -> "dict[str, Any]":
        """Errors: ConfigError for a batch that is not a dict of arrays, or has neither column."""
        if not isinstance(batch, dict):
            raise ConfigError(
                f"a batch is a {type(batch).__name__}; leave map_batches' batch_format at 'numpy'"
            )
        asked = [column for column in _URLS if column in batch]
        if len(asked) != 1:
            raise ConfigError(
                f"a batch has the columns {', '.join(batch)}; it needs one of {' and '.join(_URLS)}"
            )
        rows = self._rows(batch, asked[0])
        results = _InMemory(len(rows))
        run_batch(
            rows,
            results,
            engine=self._engine,
            frontend=self._frontend,
            max_in_flight=self._max_in_flight,
            seed=self._seed,
        )
        answers = [_flat(json.loads(row)) for row in results.rows]
        return batch | {name: [answer[name] for answer in answers] for name in OUTPUT_COLUMNS}

    def close(self) -> None:
        """Stop the group. An actor that ends does so anyway."""
        self._engine.close()

    def _rows(self, batch: "dict[str, np.ndarray]", column: str) -> list[InputRow]:
        seen: Counter[str] = Counter()
        rows = []
        for index, value in enumerate(batch[column]):
            body = self._body | _object(batch["body"][index] if "body" in batch else None)
            if body.get("n") not in (None, 1):
                raise ConfigError(f"n is {shown(body['n'])}; a row has one text: repeat it, with other seeds")
            body[column] = _plain(value)
            text = json.dumps(body, sort_keys=True, default=str)
            own = str(batch["custom_id"][index]) if "custom_id" in batch else digest(text.encode()).hex()
            seen[own] += 1
            row = {"custom_id": f"{own} {seen[own]}", "url": _URLS[column], "body": body}
            rows.append(InputRow(line=json.dumps(row, default=str), place=f"row {index + 1} of a batch"))
        return rows


class _InMemory:
    """A batch's `Results`."""

    def __init__(self, num_rows: int) -> None:
        self.rows = [""] * num_rows

    def find(self, custom_id: str, key: bytes) -> int | None:
        return None

    def reuse(self, place: int, number: int) -> bool:
        raise NotImplementedError("nothing was done before")

    def add(self, place: int, row: str, *, custom_id: str | None, key: bytes, failed: bool) -> None:
        self.rows[place] = row


def _flat(row: dict[str, Any]) -> dict[str, Any]:
    if row["error"] is not None:
        return dict.fromkeys(OUTPUT_COLUMNS) | {"error": f"{row['error']['code']}: {row['error']['message']}"}
    body = row["response"]["body"]
    choice, usage = body["choices"][0], body["usage"]
    return {
        "text": choice["text"] if "text" in choice else choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "error": None,
    }


def _object(value: Any) -> dict[str, Any]:
    """Errors: ConfigError."""
    found = json.loads(value) if isinstance(value, str) else _plain(value)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"a body is a {type(found).__name__}; it must be an object, or its JSON")
    return {name: member for name, member in found.items() if member is not None}


def _plain(value: Any) -> Any:
    """Without NumPy: Ray Data makes arrays of lists."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {name: _plain(member) for name, member in value.items() if member is not None}
    return [_plain(member) for member in value] if isinstance(value, list) else value
