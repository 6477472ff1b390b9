"""Clients of a live server: measuring it, and fitting what it reads."""
