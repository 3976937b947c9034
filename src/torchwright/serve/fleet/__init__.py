"""Several servers of one model behind Shepherd Model Gateway (`smg`)."""
