"""Communicators: the interface of the backends in backend.py, and one folder for each backend."""
