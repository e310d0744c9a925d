"""Checkpoints of a run: save, keep, find and load them, compare the run with them."""
