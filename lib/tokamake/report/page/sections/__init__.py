"""Sections of the page, a file each: `TITLE`, `PLACE` (in ascending order), and `render`.

`render(contents)` returns HTML that the page shows below the title; empty: no section.
"""
