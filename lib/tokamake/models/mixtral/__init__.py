"""The family `mixtral`."""
