"""The family `gpt`."""
