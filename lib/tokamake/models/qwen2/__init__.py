"""The family `qwen2`."""
