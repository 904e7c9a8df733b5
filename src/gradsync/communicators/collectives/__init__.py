"""What a caller can ask of a communicator: the public methods, by family, on top of a backend's hooks."""
