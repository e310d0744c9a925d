"""Experiment trackers: a plug-in file for each."""
