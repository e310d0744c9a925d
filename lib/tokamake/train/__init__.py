"""From a resolved run to a trained checkpoint."""
