"""The family `phi3`."""
