"""The format `universal`: DeepSpeed's checkpoint for any number of ranks."""
