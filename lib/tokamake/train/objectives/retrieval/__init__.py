"""The objective of question files: find the passage that answers a question."""
