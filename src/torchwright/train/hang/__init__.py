"""Why a distributed job hangs: flight-recorder dumps, aligned; and the watch that takes them in a training process."""
