"""Detoxification of a model with its own texts, as in SGEAT (https://arxiv.org/abs/2202.04173)."""

TOXICITY_THRESHOLD = 0.5
"""A text or prompt is toxic above this score."""
