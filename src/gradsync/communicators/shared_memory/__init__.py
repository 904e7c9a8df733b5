"""The backend for ranks on one host: NumPy arrays over shared memory."""
