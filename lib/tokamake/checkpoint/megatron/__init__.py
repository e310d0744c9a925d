"""How Megatron names, nests, fuses, pads and describes a model, in all formats of its kin."""
