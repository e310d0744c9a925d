"""Pairs and their weights to training samples in their order, and to batches of them."""
