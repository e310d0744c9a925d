"""Model families, one file each, written as single-device PyTorch."""
