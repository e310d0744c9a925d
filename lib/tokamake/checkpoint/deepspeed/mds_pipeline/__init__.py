"""The format `mds-pipeline`: Megatron-DeepSpeed with pipeline parallelism."""
