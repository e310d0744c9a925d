"""Lists of URLs: which URLs are left out, and how the pages of the others are fetched."""
