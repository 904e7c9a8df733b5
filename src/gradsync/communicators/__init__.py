"""How ranks move bytes: the contract, and a room for each backend."""
