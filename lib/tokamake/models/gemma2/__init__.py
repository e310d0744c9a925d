"""The family `gemma2`."""
