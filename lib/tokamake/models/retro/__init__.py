"""The family `retro`."""
