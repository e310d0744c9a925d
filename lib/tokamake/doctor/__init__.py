"""Checks of environment, profile, scheduler, disks and ranks before a run.

Each module holds one family of checks. Its functions return results; `doctor` prints them.
"""
