"""Export targets, one file each; ExecuTorch has a folder."""
