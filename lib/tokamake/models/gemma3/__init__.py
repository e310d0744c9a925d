"""The family `gemma3`."""
