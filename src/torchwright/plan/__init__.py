"""The search: trials in fresh processes, the verdicts, the recipe and the artifact."""
