"""The format `mds`: Megatron-DeepSpeed without pipeline parallelism."""
