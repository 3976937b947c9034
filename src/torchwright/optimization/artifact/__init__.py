"""The artifact: a folder that holds a recipe and what runs it; writing it is the proof's, reading it is anyone's."""
