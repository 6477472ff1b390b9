"""Tokenizer, incremental detokenizer, stop strings, chat template. Imports nothing of the project."""
