"""The family `mistral`."""
