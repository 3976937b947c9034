"""Files and batches that clients leave with the server: kept on the disk, computed behind interactive requests."""
