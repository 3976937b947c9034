"""Work that would hold the server's loop, in processes that can be ended."""
