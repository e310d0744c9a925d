"""The family `gpt_neox`."""
