"""Several machines, one `gradsync run` on each: how these meet, start the ranks together, and end them together."""
