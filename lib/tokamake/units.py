"""Times, sizes and counts as text for people."""


def duration(seconds: float) -> str:
    """Format a time with its two largest units: `2 h 05 min`, `12.3 s` (ints `12 s`)."""
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    if hours:
        return f"{hours} h {minutes:02d} min"
    if minutes:
        return f"{minutes} min {whole_seconds:02d} s"
    return f"{seconds} s" if isinstance(seconds, int) else f"{seconds:.1f} s"


def in_bytes(number: int) -> str:
    """Format a size in powers of 1,000: `12.3 MB`."""
    size, units = float(number), ["B", "kB", "MB", "GB", "TB", "PB"]
    # From 999.95 on, one decimal would round to 1000.0.
    while size >= 999.95 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.0f} B" if units[0] == "B" else f"{size:.1f} {units[0]}"


def amount(number: float) -> str:
    """Format a count with three digits: `4.77 M`."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,.0f}"
