"""Profiles of a model's calls: operators, their rates, idle time, copies; and graph breaks."""
