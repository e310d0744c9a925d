"""Names, nesting, slices and padding of Megatron's tensors, and contents of its files."""
