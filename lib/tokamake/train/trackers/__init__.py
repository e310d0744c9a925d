"""Trackers, with which people follow runs: a plug-in file for each."""
