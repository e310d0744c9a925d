"""The family `qwen3`."""
