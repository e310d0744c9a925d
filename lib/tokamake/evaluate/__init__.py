"""Scores of a trained model: on held-out text, and on tasks."""
