"""Ends of a job before the end of its run: signals, limits, a file."""
