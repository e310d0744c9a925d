"""The front door: one command that starts the workflow and shows what it does."""
