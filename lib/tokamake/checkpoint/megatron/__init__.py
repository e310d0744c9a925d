"""The format `megatron`: Megatron-LM's classic checkpoint."""
