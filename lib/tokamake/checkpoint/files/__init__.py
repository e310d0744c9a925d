"""What is in which file: those of torch.save, safetensors and torch's distributed checkpoint."""
