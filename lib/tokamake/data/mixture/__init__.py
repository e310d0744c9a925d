"""What a training draws from, and how much: the weighting file."""
