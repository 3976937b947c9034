"""Between the two processes: what they say to each other, and the HTTP process's end of it."""
