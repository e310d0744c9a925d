"""Fill-in-the-middle: rearrange documents inside samples."""
