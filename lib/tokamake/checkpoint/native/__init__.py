"""The format `native`: tokamake's own checkpoints, in torch's distributed format (DCP)."""
