"""Slices of tensors in checkpoint files: where they lie, and how they are copied and cast."""
