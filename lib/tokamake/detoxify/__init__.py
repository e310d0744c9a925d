"""Detoxification of a model with its own texts, as in SGEAT (https://arxiv.org/abs/2202.04173)."""
