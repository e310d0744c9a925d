"""Parts that all model families share."""
