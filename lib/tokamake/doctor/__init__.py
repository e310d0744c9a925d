"""Whether a run can work here: checks of environment, profile, scheduler, disks and ranks.

Each family of checks is a file; its functions give results, `doctor` gathers and prints them.
"""
