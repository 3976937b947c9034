"""One measurement in a fresh process: the process, what it is asked, and what it answers."""
