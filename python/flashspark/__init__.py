"""FlashSpark: a serving engine built around adaptive verification of block drafts."""

__version__ = "0.1.0"
