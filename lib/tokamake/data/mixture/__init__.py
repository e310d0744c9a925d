"""The mixture of a training: which datasets it draws from, and with which weights."""
