"""Communicators: the contract in base.py, and one file for each way of moving bytes."""
