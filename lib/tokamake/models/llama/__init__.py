"""The family `llama`."""
