"""Engines that run a prepared model: eager, torch.compile, ahead-of-time packages, third-party runtimes."""
