"""DeepSpeed's folders of checkpoints and the optimizer states that ZeRO cuts."""
