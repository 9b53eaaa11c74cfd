"""The tokenizer front end: text to ids, chats to ids, streamed ids to text."""

from cluster.chat.template import ChatTemplate
from cluster.tokenizer.fast_tokenizer import FastTokenizer
from cluster.tokenizer.load import TokenizerMode, load_tokenizer
from cluster.tokenizer.text_stream import TextStream
from cluster.tokenizer.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "FastTokenizer", "TextStream", "Tokenizer", "TokenizerMode", "load_tokenizer"]
