"""Model families: a folder each, written as PyTorch for a single device."""
