"""The family `biencoder`."""
