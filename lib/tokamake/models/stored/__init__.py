"""How models of a family are stored, a file a family: its tensors, transformers' model types.

Nothing here imports torch.
"""
