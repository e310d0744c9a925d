"""This process: its rank, its process group, its cores and memory, its console output.

torch and mpi4py are imported only where they are used. `torch_internals` has the private names of
torch that all layers above may use.
"""
