"""Formats of checkpoints, a file each: how to find, open and lay out one; see `opened`.

TITLE is what people call it; IN_ROOT says whether a checkpoint lies in a folder global_step<N>,
which a file `latest` beside it names.
"""
