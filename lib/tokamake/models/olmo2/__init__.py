"""The family `olmo2`."""
