"""What the command line shows on a terminal, or writes to a log: progress, and results in words."""
