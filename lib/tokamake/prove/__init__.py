"""Proofs that a layout trains as one process does."""
