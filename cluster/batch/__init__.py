"""Offline work: files of OpenAI batch rows, answered by one engine."""

from cluster.batch.runner import BatchSummary, run_batch

__all__ = ["BatchSummary", "run_batch"]
