"""A trained model on one rank or many, for evaluation and generation."""
