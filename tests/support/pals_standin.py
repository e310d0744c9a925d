"""A stand-in for the mpiexec of PALS, which Aurora, Polaris and Sunspot have: takes its options.

All nodes of the host file are this machine. Ranks are started by MPICH, whose library mpi4py is
told of, and told of nodes by PALS's variables; each has a core. Called as
`pals_standin.py MPICH FOLDER OPTION... COMMAND...` with the folder of MPICH; writes into the other
folder what it was called with.
"""

import argparse
import json
import os
import sys
from pathlib import Path


def main():
    if sys.argv[1] == "rank":
        become(int(sys.argv[2]), sys.argv[3:])
    mpich, folder, *arguments = sys.argv[1:]
    parser = argparse.ArgumentParser(prog="mpiexec")
    parser.add_argument("--version", action="version", version="mpiexec version 1.8.0 revision 0")
    for name in ("--np", "--ppn", "--depth"):
        parser.add_argument(name, type=int)
    for name in ("--hostfile", "--cpu-bind"):
        parser.add_argument(name)
    for name in ("--envall", "--line-buffer"):
        parser.add_argument(name, action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)
    nodes = Path(options.hostfile).read_text().split()
    if options.np != options.ppn * len(nodes):
        sys.exit(f"mpiexec: {options.np} ranks of {options.ppn} a node on {len(nodes)} nodes")
    with Path(folder, "mpiexec.calls").open("a") as file:
        print(json.dumps(vars(options)), file=file)
    rank = [sys.executable, "-IS", __file__, "rank", str(options.ppn), *options.command]
    os.environ["MPI4PY_LIBMPI"] = f"{mpich}/lib/libmpi.so.12"
    real = f"{mpich}/bin/mpiexec"
    os.execv(real, [real, "-launcher", "fork", "-rmk", "user", "-n", str(options.np), *rank])


def become(ranks_per_node, command):
    """Be the rank that MPICH's variables say, on a node of PALS's."""
    rank = int(os.environ["PMI_RANK"])
    for name in ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"):  # of one machine
        del os.environ[name]
    os.environ["PALS_RANKID"] = str(rank)
    os.environ["PALS_NODEID"] = str(rank // ranks_per_node)
    os.environ["PALS_LOCAL_RANKID"] = str(rank % ranks_per_node)
    os.environ["PALS_LOCAL_SIZE"] = str(ranks_per_node)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.execvp(command[0], command)


if __name__ == "__main__":
    main()
