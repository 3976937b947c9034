"""Moonshine: the sound itself goes in, of any length that a window may have, and text without timestamps comes out."""
