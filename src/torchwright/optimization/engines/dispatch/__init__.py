"""The call dispatcher: input specifications, guards, and the path of each call."""
