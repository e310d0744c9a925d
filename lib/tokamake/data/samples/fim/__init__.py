"""Fill-in-the-middle: documents rearranged inside samples."""
