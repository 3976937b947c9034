"""Whisper: a window of 30 seconds at a time, by the rules of its own decoding; the next begins where it was sure."""
