"""Tokenizer, incremental detokenizer, stop strings, chat template. Imports nothing of the project."""

from .chat_template import ChatTemplateError
from .detokenizer import IncrementalDetokenizer
from .stop import StopMatch, StopMatcher
from .tokenizer import TextTokenizer, TokenizerLoadError

__all__ = [
    "ChatTemplateError",
    "IncrementalDetokenizer",
    "StopMatch",
    "StopMatcher",
    "TextTokenizer",
    "TokenizerLoadError",
]
