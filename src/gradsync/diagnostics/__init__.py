"""What is made of the dumps of a run: what its ranks did differently, where they stand, and a picture of it."""
