"""The family `bert`."""
