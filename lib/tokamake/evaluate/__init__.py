"""Held-out evaluation of a trained model."""
