"""DeepSpeed's checkpoints: its formats, and the optimizer states that ZeRO partitions."""
