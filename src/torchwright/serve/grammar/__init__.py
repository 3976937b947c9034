"""Structured output: grammars compiled apart, and followed token by token."""
