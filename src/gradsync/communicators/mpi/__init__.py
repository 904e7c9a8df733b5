"""The communicator of CPU clusters: NumPy arrays over MPI, through mpi4py's buffer calls.

Data goes over MPI; who is alive, and what has failed, is told over the rendezvous, which starts by itself over MPI.
"""
