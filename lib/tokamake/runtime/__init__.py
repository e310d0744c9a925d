"""Where this process stands: among its peers, on its machine, before its user.

torch and mpi4py are imported only where they are used.
"""
