"""Server of models over HTTP, and a client of it."""
