"""Tensors in, tensors out: plans, KV layouts, DCP arithmetic, attention, sampling, collectives."""
