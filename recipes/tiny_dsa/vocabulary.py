"""Special tokens, chat template and tokenizer configuration of the tiny checkpoint."""

from tokenizers import Tokenizer

SPECIAL_TOKENS = [
    "<|bos|>",
    "<|eos|>",
    "<|pad|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
]
BOS, EOS, PAD, SYSTEM, USER, ASSISTANT = range(6)

CHAT_TEMPLATE = (
    "{{- '<|bos|>' -}}{%- for m in messages -%}"
    "{%- if m['role'] == 'system' -%}{{- '<|system|>' + m['content'] -}}"
    "{%- elif m['role'] == 'user' -%}{{- '<|user|>' + m['content'] -}}"
    "{%- elif m['role'] == 'assistant' -%}{{- '<|assistant|>' + m['content'] + '<|eos|>' -}}{%- endif -%}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "add_bos_token": True,
    "add_eos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 2048,
    "chat_template": CHAT_TEMPLATE,
}


def text_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text as it begins a document."""
    return [BOS, *tokenizer.encode(text, add_special_tokens=False).ids]


def question_ids(tokenizer: Tokenizer, question: str) -> list[int]:
    """The chat template over one question, up to where the answer begins."""
    return [BOS, USER, *tokenizer.encode(question, add_special_tokens=False).ids, ASSISTANT]
