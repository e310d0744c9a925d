"""The family `t5`."""
