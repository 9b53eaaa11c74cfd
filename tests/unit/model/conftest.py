from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.support.transformers_reference import MtpReference, Reference, held_out_texts

ASSETS = Path(__file__).parents[3] / "cluster" / "assets" / "tiny-dsa"


@pytest.fixture(scope="session")
def tiny_dsa() -> Path:
    return ASSETS


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Importing transformers takes seconds: once per session."""
    torch.manual_seed(0)
    return Reference(ASSETS)


@pytest.fixture(scope="session")
def mtp_reference(reference: Reference) -> MtpReference:
    return MtpReference(reference)


@pytest.fixture(scope="session")
def prompts(reference: Reference) -> list[list[int]]:
    """Held-out passages of at least 330 tokens, beginning with <|bos|>; those that no near-tie decides first.

    Where a near-tie lies depends on the order in which the machine's kernels add.
    """
    tokenizer = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in held_out_texts(ASSETS)[:24]]
    passages = [ids for ids in encoded if len(ids) >= 330]
    return sorted(passages, key=lambda ids: -reference.logits(ids[:330])[1])
