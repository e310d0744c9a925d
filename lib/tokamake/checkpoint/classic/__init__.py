"""Optimizer states of Megatron-LM, classic: read, and made."""
