"""The heart: draft, lay out, verify, accept, commit."""
