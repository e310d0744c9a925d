"""Parallelism: the mesh of ranks, parallel layers, pipelines, context parallelism, sharding."""
