"""What a run does when numbers are bad, or when ranks hang or lag."""
