"""What ranks print: from their pipes, line by line, to the launcher's streams and to log files."""
