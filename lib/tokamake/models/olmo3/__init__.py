"""The family `olmo3`."""
