"""This process: its rank, its process group, its cores and memory, its lines for people.

torch and mpi4py are imported only where they are used.
"""
