"""Finetuning: an encoder learns a task of its own from labeled rows, and is scored on it."""
