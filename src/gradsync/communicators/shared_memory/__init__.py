"""The communicator between processes of one host without a GPU: NumPy over shared memory."""
