"""How ranks share a model and its batches: meshes, parallel layers, pipelines, shards."""
