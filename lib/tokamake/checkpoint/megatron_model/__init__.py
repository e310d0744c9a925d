"""How Megatron names, nests, slices and pads the tensors of a model."""
