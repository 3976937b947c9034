"""Models whose trained weights ship in packages, with a task's metric on real inputs from packages."""
