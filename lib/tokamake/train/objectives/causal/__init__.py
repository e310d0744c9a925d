"""The objective causal: predict the next token."""
