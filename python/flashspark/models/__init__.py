"""Targets (Qwen3 dense) and drafts (DFlash, DFlash2, DSpark)."""
