"""Corpus, training and export of FlashSpark's demo pair (see docs/demo-pair.md)."""
