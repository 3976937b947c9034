"""The messages between the two processes, and the HTTP process's side of them."""
