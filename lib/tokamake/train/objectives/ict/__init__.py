"""The objective ict: find the block of a document that a sentence comes from."""
