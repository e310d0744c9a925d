"""Training samples: sample index, blend, loader and fill-in-the-middle."""
