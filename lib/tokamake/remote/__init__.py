"""Files on the Hugging Face Hub and at https addresses: list them, and download each once.

The workflow lists files when it plans, and keeps the list in the plan. It downloads them on
the login node, into a cache that all workspaces share; a workspace has links. Nothing else needs a
network.
"""
