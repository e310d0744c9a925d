"""How far a workflow has come, from its files alone."""
