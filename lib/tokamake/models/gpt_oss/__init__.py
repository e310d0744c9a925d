"""The family `gpt_oss`."""
