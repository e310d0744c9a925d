"""The family `qwen3_moe`."""
