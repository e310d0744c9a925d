"""The objective span_corruption: restore spans of text in a decoder, as T5 does."""
