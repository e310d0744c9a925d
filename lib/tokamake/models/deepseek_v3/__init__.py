"""The family `deepseek_v3`."""
