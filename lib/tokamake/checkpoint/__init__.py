"""Checkpoint formats and the stages that convert between them."""
