"""From trained steps back to documents, and from documents to steps."""
