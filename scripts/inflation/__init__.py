"""Widening the demo pair to the geometry of a real model without changing what it computes."""
