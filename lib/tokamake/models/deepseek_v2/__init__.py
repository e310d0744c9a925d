"""The family `deepseek_v2`."""
