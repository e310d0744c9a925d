"""Megatron-LM's distributed checkpoint, its default: `--ckpt-format torch_dist`."""
