"""Reactions of a run to bad numbers, and to ranks that hang or lag."""
