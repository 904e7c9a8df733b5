"""The communicator of CPU clusters: NumPy arrays over MPI, through mpi4py's buffer calls.

Data goes over MPI. Who is alive, and what has failed, the ranks learn from the rendezvous server, whose address they
share over MPI. From top to bottom: mpi_backend, mpi_reduction, waiting, mpi_job.
"""
