"""Text drawn from a trained model."""
