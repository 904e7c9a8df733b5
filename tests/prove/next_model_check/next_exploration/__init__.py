"""Every state that the server's core can be brought into, and what has to hold in each."""
