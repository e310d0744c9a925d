"""What makes a step of several ranks, one file each: `Engine`."""
