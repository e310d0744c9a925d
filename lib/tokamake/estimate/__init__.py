"""The cost of a run before it starts, and layouts that fit: tokens, disk, memory, time, money."""
