"""Progress of a workflow, read from its files."""
