"""The family `smollm3`."""
