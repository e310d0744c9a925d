"""Lists of URLs: cleaning, and fetching of the pages of the URLs that are left."""
